"""Measure what rollouts and updates of flow models cost beside their transformer alone, in pairs.

    OMP_NUM_THREADS=1 python scripts/bench_flow.py [--rounds 5] [--json FILE] [--size shapes] [--size wide] [--only rollout]

The *bare* model is the transformer with the arguments of the very calls that a rollout or an update made, in their order:
without gradient, or each followed by a backward pass. A rollout is `flow.rollout.walk`: starts, growth and noise, without
decoding. A tree is compared with chains of as many leaves: *evaluations* counts what a saving could be at the most. Sizes:

 - `shapes`: the embedded model, calls of 8 and of 32 rows, all weights trained.
 - `wide`: a random SD3 transformer of 24 layers x 256 in the embedded pipeline, calls of 8 rows, adapters trained.

Where there is a GPU they run on it, in wall seconds. Prints a table in Markdown.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import paired
import torch
from accelerate import Accelerator
from diffusers import SD3Transformer2DModel
from paired import Ratio, Work, exactly, in_turns, spread

from flowgrpo import config
from flowgrpo.data import prompts
from flowgrpo.data.prompts import Row
from flowgrpo.flow.config import Config
from flowgrpo.flow.encoding import longest_and_shortest, rows_of
from flowgrpo.flow.pipeline.loading import load_pipeline
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.flow.rollout import walk
from flowgrpo.flow.setup import trainable
from flowgrpo.flow.trainer import Trainer
from flowgrpo.training import scorer
from flowgrpo.training.weights import Weights
from samplers.trees import Root, Tree

KINDS = {
    "chain": {"preset": "flow_grpo", "objective": {"kl": {"beta": 0.0}}},
    "window": {"preset": "flow_grpo_fast"},
    "brush": {
        "preset": "tempflow_fast",
        "tree": {"branches": 8, "profile": [8, 8]},
        "objective": {"kl": {"beta": 0.0}},
    },
    "branch": {"preset": "branch_grpo"},
    "twigs": {"preset": "stepwise_flow_grpo", "tree": {"length": 1}},
}
SAVING = ("brush", "branch")  # which share states among their leaves


@dataclass(frozen=True)
class Size:
    """A model, and the calls that are measured: rows in each, and samples of a group."""

    transformer: Callable[[], torch.nn.Module] | None
    lora: dict[str, Any] | None
    rows: Sequence[int]
    group: int


def wide() -> torch.nn.Module:
    """A random transformer of 24 layers, 256 wide, that fits the embedded pipeline."""
    own = {"num_layers": 24, "num_attention_heads": 8, "attention_head_dim": 32, "caption_projection_dim": 256}
    before = load_pipeline("shapes", torch.float32).transformer.config
    torch.manual_seed(0)
    return SD3Transformer2DModel.from_config({**before, **own})


SIZES = {
    "shapes": Size(None, None, (8, 32), 32),
    "wide": Size(wide, {"rank": 8}, (8,), 8),
}


def settings(size: Size, kind: str, rows: int, **train: Any) -> Config:
    """The run that is measured: one group, one optimizer step."""
    written = {
        "model": {"path": "shapes", "lora": size.lora},
        "prompts": {"train": "shapes:train", "eval": "shapes:eval"},
        "algorithm": KINDS[kind],
        "train": {"groups": 1, "group_size": size.group, "updates": 1, "micro_batch": rows, "ema": None, **train},
        "run": {"dir": tempfile.gettempdir(), "name": "bench"},
    }
    return config.validated(written)


def begun(size: Size) -> tuple[DiffusersPolicy, Weights]:
    """The policy of a size, on the GPU where there is one, and what is trained of it."""
    pipe = load_pipeline("shapes", torch.float32)
    if size.transformer is not None:
        pipe.register_modules(transformer=size.transformer())
    pipe.to("cuda" if torch.cuda.is_available() else "cpu")
    policy = DiffusersPolicy(pipe, {"num_inference_steps": 10, "guidance_scale": 1.0, "height": 64, "width": 64})
    weights = trainable(settings(size, "chain", 1).model, policy, ema=None)
    weights.to(next(iter(policy.modules.values())).device)
    return policy, weights


def trainer_of(policy: DiffusersPolicy, weights: Weights, chosen: Config) -> Trainer:
    """The training loop of a run on prompts of the embedded model, which its reward scores."""
    rows = prompts.load_split(chosen.prompts, "train")[:1]
    rewards, _ = scorer.rewards(chosen.rewards, [])
    made = Trainer(chosen, policy, weights, rewards=rewards, train_prompts=rows, accelerator=Accelerator())
    made.folder.mkdir(exist_ok=True)  # for what its report says
    policy.prepare(rows_of(longest_and_shortest(rows)))
    policy.start(rows_of(rows))
    return made


@contextmanager
def recorded(policy: DiffusersPolicy) -> Iterator[list[dict[str, Any]]]:
    """The arguments of the calls of the transformer inside this context."""
    calls: list[dict[str, Any]] = []
    (network,) = policy.modules.values()
    hook = network.register_forward_pre_hook(lambda own, args, given: calls.append(given), with_kwargs=True)
    try:
        yield calls
    finally:
        hook.remove()


def bare(policy: DiffusersPolicy, calls: Sequence[dict[str, Any]], *, learns: bool = False) -> Work:
    """The same calls of the transformer alone; where it learns, each with a backward pass."""
    (network,) = policy.modules.values()

    def work() -> None:
        with torch.set_grad_enabled(learns):
            for given in calls:
                (out,) = network(**given)
                if learns:
                    out.float().square().mean().backward()

    return work


def grown(trainer: Trainer) -> Tree:
    """The trees of the first iteration."""
    train, algorithm = trainer.config.train, trainer.config.algorithm
    kernels = algorithm.kernel.kernels(len(trainer.policy.sigmas) - 1)
    plan = algorithm.plan(kernels, train.group_size, 0, 0)
    row = rows_of(trainer.train_prompts[:1])[0]
    roots = [Root(0, i, replace(row, seed=i)) for i in range(algorithm.roots(train.group_size))]
    return walk(trainer.policy, plan, roots, micro_batch=train.rollout_rows, seed=0, iteration=0)


def rollouts(name: str, rounds: int) -> dict[str, Ratio]:
    """Rollouts over the bare calls; trees over chains of as many leaves, beside what the evaluations promise."""
    size, found = SIZES[name], {}
    policy, weights = begun(size)
    for rows in size.rows:
        works, evaluations, leaves = {}, {}, {}
        for kind in KINDS:
            trainer = trainer_of(policy, weights, settings(size, kind, rows))
            with recorded(policy) as calls:
                tree = grown(trainer)
            works[kind], works[f"{kind} bare"] = partial(grown, trainer), bare(policy, calls)
            evaluations[kind], leaves[kind] = sum(len(e.rows) for e in tree.evaluations), len(tree.leaves)
        taken = in_turns(works, rounds)
        for kind in KINDS:
            found[f"{name}, {rows} rows: rollout of a {kind} / bare"] = paired.paired(
                taken[kind], taken[f"{kind} bare"]
            )
        for kind in SAVING:
            share = evaluations[kind] / leaves[kind] / (evaluations["chain"] / leaves["chain"])
            each = [taken[kind][i] / leaves[kind] / (taken["chain"][i] / leaves["chain"]) for i in range(rounds)]
            found[f"{name}, {rows} rows: leaf of a {kind} / of a chain"] = spread(each)
            found[f"{name}, {rows} rows: leaf of a {kind} / of a chain, evaluations"] = exactly(share)
            saved = spread([(1 - ratio) / (1 - share) for ratio in each])
            found[f"{name}, {rows} rows: saving of a {kind} / what evaluations promise"] = saved
    return found


def updates(name: str, rounds: int) -> dict[str, Ratio]:
    """Updates over the bare calls with their backward passes; iterations that keep graphs over those that replay."""
    size, found = SIZES[name], {}
    policy, weights = begun(size)
    for rows in size.rows:
        for kind in ("chain", "window", "brush"):
            trainer = trainer_of(policy, weights, settings(size, kind, rows))

            def rolled(trainer: Trainer = trainer) -> tuple[Any, ...]:
                batch = trainer.rollout(0, trainer.groups(0))
                units = trainer.units(batch)
                return batch, units, *trainer.advantages(units, batch)[:2]

            def iteration(*kept: int, trainer: Trainer = trainer, rolled: Callable = rolled) -> None:
                trainer.kept_graphs.parts = kept
                trainer.update(*rolled())

            stands = rolled()
            with recorded(policy) as calls:
                trainer.update(*stands)
            works = {"update": partial(trainer.update, *stands), "bare": bare(policy, calls, learns=True)}
            with trainer.report:
                trainer.on_start()
            if trainer.kept_graphs.parts:  # there is memory for them
                works |= {"replays": iteration, "keeps": partial(iteration, 0)}
            taken = in_turns(works, rounds)
            place = f"{name}, {rows} rows"
            found[f"{place}: update of a {kind} / bare"] = paired.paired(taken["update"], taken["bare"])
            if "keeps" in taken:
                kept = paired.paired(taken["keeps"], taken["replays"])
                found[f"{place}: iteration of a {kind}, graphs kept / replayed"] = kept
    return found


def decoding(name: str, rounds: int) -> dict[str, Ratio]:
    """Decoding over the decoder alone."""
    size, found = SIZES[name], {}
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
        found[f"{name}, {rows} rows: decoding / bare"] = paired.paired(taken["ours"], taken["bare"])
    return found


PARTS = {"rollout": rollouts, "update": updates, "decoding": decoding}


def ratios(rounds: int, names: Sequence[str] = tuple(SIZES), parts: Sequence[str] = tuple(PARTS)) -> dict[str, Ratio]:
    """All ratios of some sizes."""
    found: dict[str, Ratio] = {}
    for name in names:
        for part in parts:
            if part != "decoding" or name == "shapes":  # the decoder is the same
                found |= PARTS[part](name, rounds)
    return found


def main() -> None:
    """The command line."""
    parser = paired.parser(__doc__, rounds=5)
    parser.add_argument("--size", action="append", choices=list(SIZES), help="all, unless some are named")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="all, unless some are named")
    options = parser.parse_args()
    torch.set_num_threads(1)
    paired.tell(ratios(options.rounds, options.size or tuple(SIZES), options.only or tuple(PARTS)), options)


if __name__ == "__main__":
    main()
