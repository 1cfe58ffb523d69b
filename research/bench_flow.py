"""Measure the cost of rollouts and updates of flow models relative to their transformer alone, in pairs.

    OMP_NUM_THREADS=1 python research/bench_flow.py [--rounds 5] [--json FILE] [--size shapes] [--only rollout]
    OMP_NUM_THREADS=1 python research/bench_flow.py --size wide --only rollout --groups 4 [--kind chain] [--kind branch]
    python research/bench_flow.py --size sd35-medium --size flux1-dev [--kind window] [--json FILE]    # on a GPU

The *bare* model repeats the transformer's calls of a rollout or an update, with the same arguments in the same order:
without gradient, or each followed by a backward pass. A rollout is `flow.rollouts.rollout.walk`: starts, growth and
noise, without decoding. On a CPU a rollout is also compared with the time that it spends in the transformer itself;
this ratio does not suffer if the speed of the machine changes between turns. A tree is compared with chains that have
as many leaves; the ratio of *evaluations* bounds the saving. A rollout has one group, or N groups that share calls with
`--groups N`. Sizes:

 - `shapes`: the embedded model, calls of 8 and of 32 rows, all weights trained.
 - `wide`: a random SD3 transformer of 24 layers x 256 in the embedded pipeline, calls of 8 rows, adapters trained.
 - `sd35-medium`, `flux1-dev`, `wan21-1.3b`: networks of these sizes with random weights in bfloat16, of which adapters are
   trained, with the call (in ten steps) and the checkpointing of the built-in config. Without a GPU they run only if they
   are named.

All sizes run on a GPU if there is one, in wall seconds; `scripts/gpu_check.py` measures seconds, memory and launches
there. Prints a table in Markdown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import flow_sizes
import paired
import torch
from flow_sizes import begun, settings, trainer_of
from paired import Ratio, Work, exactly, in_turns, spread

from flowgrpo.data.prompts import Row
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.flow.planning.iteration_forecast import most_graphs
from flowgrpo.flow.rollouts.prompt_encoding import build_rows
from flowgrpo.flow.rollouts.rollout import edge_noise, walk
from flowgrpo.training.comparison import compare
from flowgrpo.training.loop import Loop
from flowgrpo.training.wing import Compared
from samplers.growth import draw_noise
from samplers.trees import Root, Tree

SAVING = ("brush", "branch")  # kinds of trees whose leaves share states
EVERY = tuple(flow_sizes.KINDS)


def placed(name: str, rows: int, groups: int = 1) -> str:
    """Return the beginning of a ratio's name: size, GPU, rows and groups."""
    where = f" on {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{name}{where}, {rows} rows" + (f", {groups} groups" if groups > 1 else "")


@contextmanager
def recorded(policy: DiffusersPolicy) -> Iterator[list[dict[str, Any]]]:
    """Record the arguments of the transformer's calls inside this context."""
    calls: list[dict[str, Any]] = []
    (network,) = policy.modules.values()
    hook = network.register_forward_pre_hook(lambda module, args, given: calls.append(given), with_kwargs=True)
    try:
        yield calls
    finally:
        hook.remove()


def bare(policy: DiffusersPolicy, calls: Sequence[dict[str, Any]], *, learns: bool = False) -> Work:
    """Return work that repeats calls of the transformer; with `learns`, each has a backward pass."""
    (network,) = policy.modules.values()

    def work() -> None:
        with torch.set_grad_enabled(learns):
            for given in calls:
                (out,) = network(**given)
                if learns:
                    out.float().square().mean().backward()

    return work


def grown(trainer: Loop) -> Tree:
    """Return the trees of the first iteration, with a group for each prompt of the trainer."""
    train, algorithm = trainer.state.config.train, trainer.state.config.algorithm
    kernels = algorithm.kernel.kernels(len(trainer.state.policy.sigmas) - 1)
    plan = algorithm.plan(kernels, train.group_size, 0, 0)
    seeds = range(algorithm.roots(train.group_size))
    prompts = enumerate(build_rows(trainer.state.train_prompts))
    roots = [Root(group, i, replace(row, seed=i)) for group, row in prompts for i in seeds]
    return walk(trainer.state.policy, plan, roots, micro_batch=train.rollout_rows, seed=0, iteration=0)


def noises(tree: Tree) -> Work:
    """Return work that draws all noise of a tree's edges, on the host."""
    drawn, shape = edge_noise(0, 0), tree.samples[0].shape[1:]

    def work() -> None:
        for evaluation in tree.evaluations:
            for edges in evaluation.edges:
                if edges.move.kernel.stochastic:
                    draw_noise(tree, edges, shape, 0, drawn)

    return work


def rollouts(name: str, rounds: int, kinds: Sequence[str] = EVERY, *, groups: int = 1) -> dict[str, Ratio]:
    """Return the ratios of rollouts to bare calls, and of trees to chains with as many leaves, in time and evaluations."""
    size, found = flow_sizes.SIZES[name], {}
    policy, weights = begun(size)
    for rows in size.rows:
        place = placed(name, rows, groups)
        works, evaluations, leaves = {}, {}, {}
        for kind in kinds:
            trainer = trainer_of(policy, weights, settings(size, kind, rows, groups=groups))
            grown(trainer)  # the first rollout may test how rows can share a call
            with recorded(policy) as calls:
                tree = grown(trainer)
            works[kind], works[f"{kind} bare"] = partial(grown, trainer), bare(policy, calls)
            if kind == "chain":
                works["noise"] = noises(tree)
            evaluations[kind], leaves[kind] = sum(len(e.rows) for e in tree.evaluations), len(tree.leaves)
        taken = in_turns(works, rounds)
        for kind in kinds:
            found[f"{place}: rollout of a {kind} / bare"] = paired.paired(taken[kind], taken[f"{kind} bare"])
        if "chain" in kinds:
            found[f"{place}: noise of a chain / bare"] = paired.paired(taken["noise"], taken["chain bare"])
        for kind in [tree for tree in SAVING if {tree, "chain"} <= set(kinds)]:
            share = evaluations[kind] / leaves[kind] / (evaluations["chain"] / leaves["chain"])
            each = [taken[kind][i] / leaves[kind] / (taken["chain"][i] / leaves["chain"]) for i in range(rounds)]
            found[f"{place}: leaf of a {kind} / of a chain"] = spread(each)
            found[f"{place}: leaf of a {kind} / of a chain, evaluations"] = exactly(share)
            saved = spread([(1 - ratio) / (1 - share) for ratio in each])
            found[f"{place}: saving of a {kind} / what evaluations promise"] = saved
    return found


@contextmanager
def over_inside(network: torch.nn.Module) -> Iterator[Callable[[Work], float]]:
    """Yield a function that returns the CPU seconds of a piece of work over those that it spends in a network."""
    spent, entered = 0.0, 0.0

    def enter(*_: Any) -> None:
        nonlocal entered
        entered = time.process_time()

    def leave(*_: Any) -> None:
        nonlocal spent
        spent += time.process_time() - entered

    def ratio(work: Work) -> float:
        nonlocal spent
        spent = 0.0
        return paired.cpu(work) / spent

    hooks = [network.register_forward_pre_hook(enter), network.register_forward_hook(leave)]
    try:
        yield ratio
    finally:
        for hook in hooks:
            hook.remove()


def inside(name: str, rounds: int, kinds: Sequence[str] = EVERY) -> dict[str, Ratio]:
    """Return the ratios of rollouts to the CPU seconds that they spend in the transformer."""
    size, found = flow_sizes.SIZES[name], {}
    policy, weights = begun(size)
    (network,) = policy.modules.values()
    with over_inside(network) as ratio:
        for rows in size.rows:
            for kind in kinds:
                trainer = trainer_of(policy, weights, settings(size, kind, rows))
                taken = in_turns({"rollout": partial(grown, trainer)}, rounds, ratio)
                found[f"{placed(name, rows)}: rollout of a {kind} / transformer in it"] = spread(taken["rollout"])
    return found


def updates(name: str, rounds: int, kinds: Sequence[str] = EVERY) -> dict[str, Ratio]:
    """Return the ratios of updates to bare calls with backward passes, and of iterations with kept graphs to replays."""
    size, found = flow_sizes.SIZES[name], {}
    policy, weights = begun(size)
    for rows in size.rows:
        for kind in [each for each in ("chain", "window", "brush") if each in kinds]:
            trainer = trainer_of(policy, weights, settings(size, kind, rows))

            def rolled(trainer: Loop = trainer) -> tuple[Any, ...]:
                batch = trainer.wing.rollout(0, trainer.state.groups(0))
                return batch, compare(trainer.state, trainer.wing, trainer.wing.units(batch), batch)

            def update(batch: Any, compared: Compared, trainer: Loop = trainer) -> None:
                minibatches = trainer.wing.minibatches(batch, compared)
                minibatches.prepare()
                for number in range(len(minibatches)):
                    minibatches.step(number)

            def iteration(kept: int, trainer: Loop = trainer, rolled: Callable = rolled) -> None:
                trainer.wing.kept_graphs.steps = kept
                update(*rolled())

            stands = rolled()
            with recorded(policy) as calls:
                update(*stands)
            works = {"update": partial(update, *stands), "bare": bare(policy, calls, learns=True)}
            graphs, state = trainer.wing.kept_graphs, trainer.state
            every = len(most_graphs(state.config, len(state.policy.sigmas) - 1).graph_rows)
            graphs.restore({"graph_steps": every})  # as a resumed run: free memory alone is the limit
            with state.report:
                trainer.wing.start(trainer.wing.rollout, trainer.batch_sizes.to_come)
            if graphs.steps == every:  # they fit into memory
                works |= {"replays": partial(iteration, 0), "keeps": partial(iteration, every)}
            taken = in_turns(works, rounds)
            place = placed(name, rows)
            found[f"{place}: update of a {kind} / bare"] = paired.paired(taken["update"], taken["bare"])
            if "keeps" in taken:
                kept = paired.paired(taken["keeps"], taken["replays"])
                found[f"{place}: iteration of a {kind}, graphs kept / replayed"] = kept
    return found


def decoding(name: str, rounds: int) -> dict[str, Ratio]:
    """Return the ratios of decoding to the decoder alone."""
    size, found = flow_sizes.SIZES[name], {}
    policy, _ = begun(size)
    for rows in size.rows:
        asked = [Row("a red circle", seed) for seed in range(rows)]
        state = policy.start(asked)
        vae = policy.pipe.vae
        latents = state[0] / vae.config.scaling_factor + vae.config.shift_factor

        def alone(vae: torch.nn.Module = vae, latents: torch.Tensor = latents) -> None:
            with torch.no_grad():
                vae.decode(latents)

        taken = in_turns({"ours": partial(policy.decode, state, asked), "bare": alone}, rounds)
        found[f"{placed(name, rows)}: decoding / bare"] = paired.paired(taken["ours"], taken["bare"])
    return found


def fullness(name: str, rounds: int) -> dict[str, Ratio]:
    """Return the ratios of a full call, split into several calls, to the full call, all with backward passes."""
    size, found = flow_sizes.SIZES[name], {}
    policy, weights = begun(size)
    most = max(size.rows)
    trainer = trainer_of(policy, weights, settings(size, "chain", most))
    grown(trainer)
    with recorded(policy) as calls:
        grown(trainer)
    call = calls[0]
    batch = len(call["hidden_states"])  # twice the rows with guidance
    works = {}
    for count in sorted({1, 2, 4, 8, most}):
        if most % count == 0:
            parts = [{key: _part(x, batch, i, count) for key, x in call.items()} for i in range(count)]
            works[count] = bare(policy, parts, learns=True)
    taken = in_turns(works, rounds)
    for count in works:
        if count > 1:
            told = f"{placed(name, most)}: forward and backward passes in {count} calls / in one"
            found[told] = paired.paired(taken[count], taken[1])
    return found


def _part(value: Any, batch: int, index: int, count: int) -> Any:
    """Return one of `count` equal parts of a call's argument; arguments without a row dimension stay whole."""
    whole = not isinstance(value, torch.Tensor) or not value.ndim or len(value) != batch
    return value if whole else value.chunk(count)[index]


PARTS = {"rollout": rollouts, "inside": inside, "update": updates, "fullness": fullness, "decoding": decoding}
BY_KIND = ("rollout", "inside", "update")


def parts_of(name: str) -> list[str]:
    """Return the parts that are measured for a size.

    Decoding is measured for `shapes` only (`wide` has the same decoder). `inside` needs a CPU, where a call returns only
    when it is done.
    """
    left_out = {"inside": torch.cuda.is_available(), "decoding": name != "shapes"}
    return [part for part in PARTS if not left_out.get(part)]


def ratios(
    rounds: int,
    names: Sequence[str] = tuple(flow_sizes.SIZES),
    parts: Sequence[str] = tuple(PARTS),
    kinds: Sequence[str] = EVERY,
    *,
    groups: int = 1,
) -> Iterator[dict[str, Ratio]]:
    """Yield the ratios of each part of each size, as soon as they are measured."""
    given = {part: {"kinds": kinds} for part in BY_KIND}
    given["rollout"]["groups"] = groups
    for name in names:
        for part in parts:
            if part in parts_of(name):
                yield PARTS[part](name, rounds, **given.get(part, {}))


def main() -> None:
    """Run the command line."""
    parser = paired.parser(__doc__, rounds=5)
    parser.add_argument(
        "--size",
        action="append",
        choices=list(flow_sizes.SIZES),
        help="without a GPU the first two, unless some are named",
    )
    parser.add_argument("--only", action="append", choices=list(PARTS), help="all, unless some are named")
    parser.add_argument("--kind", action="append", choices=EVERY, help="of runs; all, unless some are named")
    parser.add_argument("--groups", type=int, default=1, help="of a rollout, grown side by side; 1 unless given")
    options = parser.parse_args()
    if options.groups != 1 and set(options.only or ()) != {"rollout"}:
        parser.error(f"--groups {options.groups}: it goes with --only rollout and no other part")
    most = flow_sizes.most_groups()
    if not 1 <= options.groups <= most:
        parser.error(f"--groups {options.groups}: must be 1 to {most}, the prompts of the embedded model")
    torch.set_num_threads(1)
    sizes = options.size or [
        name for name, size in flow_sizes.SIZES.items() if size.config is None or torch.cuda.is_available()
    ]
    parts = options.only or list(PARTS)
    if not any(part in parts_of(name) for name in sizes for part in parts):
        parser.error(f"--only {' --only '.join(parts)} measures nothing of {', '.join(sizes)} on this machine")
    found: dict[str, Ratio] = {}
    for measured in ratios(options.rounds, sizes, parts, options.kind or EVERY, groups=options.groups):
        found |= measured
        paired.keep(found, options)
    paired.tell(found, options)


if __name__ == "__main__":
    main()
