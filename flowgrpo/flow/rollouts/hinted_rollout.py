"""Hinted rollouts: grow a share of each failed group again, from noised good samples of its prompt.

The formulas are those of `methods.hints`; candidates are sampled by `flow.rollouts.search`. What the run remembers, good
samples and the ladder of each prompt, is equal on all processes and saved in checkpoints.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from PIL import Image

from flowgrpo.data import conditions
from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.config import Config
from flowgrpo.flow.methods import hints
from flowgrpo.flow.methods.credit.rules import trunk_ends
from flowgrpo.flow.pipeline import vae_encoder
from flowgrpo.flow.pipeline.policy import DiffusersPolicy, Policy
from flowgrpo.flow.rollouts.rollout import Batch, Hinted, Trial, start_roots
from flowgrpo.flow.rollouts.search import Searcher, compared_steps
from flowgrpo.flow.rollouts.state_preview import StatePreview
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.distributed.assignment import Member
from flowgrpo.training.prompts.failed_groups import failed_groups
from flowgrpo.training.reports.metrics import mean
from flowgrpo.training.reports.samples import COMPARE_AT, SearchUse
from flowgrpo.training.scoring.scorer import Scores
from flowgrpo.training.state import RunState
from samplers import noise
from samplers.growth import trained_steps
from samplers.kernels import State
from samplers.levels import DEFAULT_LEVELS
from samplers.pruning import replace_roots
from samplers.trees import Plan, Root, Tree, stack_states

Tensor = torch.Tensor
Roll = Callable[..., tuple[Tree, Scores]]
LADDERS, ORDER = "ladders", "order"  # names of the state's tensors that hold no sample


class Hints:
    """The hints of a run.

    Attributes:
        ladders: the bounds of each prompt with a history; see `methods.hints.climb`.
        winners: the remembered good samples of each prompt, latest last; prompts in the order of their last win.
    """

    def __init__(self, run: RunState):
        self._run = run
        self._policy: Policy = run.policy
        hints_of_run = self._config.algorithm.hints
        assert isinstance(hints_of_run, hints.Noised)
        self._settings = hints_of_run
        self._encoder: vae_encoder.Encoder | None = None
        self.ladders: dict[int, hints.Bounds] = {}
        self.winners: dict[int, list[State]] = {}

    @property
    def _config(self) -> Config:
        """The configuration, with the batch sizes found so far."""
        return cast("Config", self._run.config)

    @property
    def deciding(self) -> int:
        """Return the column of the reward that decides whether a sample succeeds."""
        name = self._settings.reward
        return 0 if name is None else self._config.reward_names.index(name)

    def prepare(self, row: Row) -> None:
        """Probe how the pipeline encodes pictures, for the source data; `row` may be any row.

        Raise InputError if schedule, states or pictures do not go with noised starts.
        """
        hints.check_policy(self._config, self._policy)
        if (use := search_use(self._settings)) is not None:
            compared_steps(use, len(self._policy.sigmas) - 1)
        if self._settings.source == "data":
            self._encoder = vae_encoder.encoder(cast("DiffusersPolicy", self._policy), row)

    @torch.no_grad()
    def help(self, batch: Batch, plan: Plan, roots: Sequence[Root], *, iteration: int, roll: Roll) -> Batch:
        """Return the batch with a share of the roots of each failed group replaced by noised good samples.

        All roots of a group are on this process. A group whose prompt has no good sample is left as it is, and with the
        sources search and teacher also if no candidate of it succeeds. `roll` is `rollout` with all but its roots, their
        states and the address of their noise.
        """
        values, members = batch.outcomes
        failed = failed_groups(values[:, self.deciding], [group for group, _ in members], self._settings.success)
        prompts = {group: batch.groups.prompts[group] for group in failed}
        lacking = [  # the first group of a prompt speaks for all, whichever process has it
            group
            for group, prompt in prompts.items()
            if prompt not in self.winners and batch.groups.prompts.index(prompt) == group
        ]
        found, candidates = self._search({root.group: root.row for root in roots if root.group in lacking}, iteration)
        plain = Hinted(
            rewards=values,
            members=members,
            won=[*self._find_winners(batch), *_list_winners(found, prompts)],
            searched=len(found),
            found=sum(map(bool, found.values())),
            decoded=candidates,
        )
        chosen = self._choose(prompts, plan, roots, iteration, found=found)
        if not chosen:
            return replace(batch, hinted=plain)
        hinted, picked = zip(*chosen, strict=True)
        tree, scores = roll(hinted, start=self._start(hinted, picked), address="hinted edge")
        grown = replace_roots(batch.tree, tree)
        kept = torch.tensor([index for index, leaf in enumerate(batch.tree.leaves) if leaf in set(grown.leaves)])
        both = Scores(
            torch.cat([batch.scores.values[kept.long()], scores.values]),
            torch.cat([batch.scores.lost[kept.long()], scores.lost]),
            batch.scores.seconds + scores.seconds,
        )
        return replace(
            batch,
            tree=grown,
            scores=both,
            previews=_keep_previews(batch.previews, {(root.group, root.index) for root in hinted}),
            hinted=replace(
                plain,
                trials=self._trials(tree, scores, prompts),
                samples=len(trunk_ends(tree)),
                decoded=candidates + len(batch.tree.leaves) - len(kept),
            ),
        )

    def _search(self, rows: Mapping[int, Row], iteration: int) -> tuple[dict[int, list[State]], int]:
        """Sample candidates of the prompts of failed groups, if the source does so.

        Return the successful ones of each group, the last to remember, and the number of decoded samples.
        """
        settings, run, use = self._settings, self._run, search_use(self._settings)
        if use is None or not rows:
            return {}, 0
        searcher = Searcher(self._policy, use, run.rewards, run.config.train.rollout_rows, shard=run.shard)
        seeds = {group: noise.seed(run.config.run.seed, "search", iteration, group) for group in rows}
        with run.weights.policy("reference" if settings.source == "teacher" else "live"):
            searched = searcher.candidates([replace(row, seed=seeds[group]) for group, row in rows.items()])
        found: dict[int, list[State]] = {}
        for group, each in zip(rows, searched, strict=True):
            assert each.states is not None, "best-of-n is none"
            won = (each.rewards[:, self.deciding] >= settings.success).nonzero().flatten().tolist()
            found[group] = [tuple(x[i].cpu().clone() for x in each.states) for i in won[-settings.winners :]]
        return found, searcher.cost["decoded"]

    def _choose(
        self,
        prompts: Mapping[int, int],
        plan: Plan,
        roots: Sequence[Root],
        iteration: int,
        *,
        found: Mapping[int, list[State]],
    ) -> list[tuple[Root, State]]:
        """Return the roots that start anew, each with its good sample: the last ones of each failed group.

        `found` are the successful candidates of groups whose prompt has no other good sample.
        """
        sigmas, config = self._policy.sigmas, self._config
        last = max(sigmas.index(sigma) for _, sigma, _ in trained_steps(plan, sigmas))
        rungs = hints.find_rungs(sigmas, self._settings.ladder, last)
        chosen: list[tuple[Root, State]] = []
        for group, prompt in prompts.items() if rungs else ():
            own = [root for root in roots if root.group == group]
            good = found.get(group) or self._good_samples(prompt, own[0].row)
            for root in own[len(own) - int(self._settings.replace * len(own)) :] if good else ():
                address = (config.run.seed, "hinted", iteration, group)
                start = 0 if config.algorithm.tree.start == "shared" else root.index
                row = replace(root.row, seed=noise.seed(*address, start))
                step = rungs[hints.choose_rung(self._bounds(prompt), len(rungs))]
                drawn = int(noise.generator(*address, "winner", root.index).integers(len(good)))
                chosen.append((replace(root, row=row, step=step), good[drawn]))
        return chosen

    def _start(self, roots: Sequence[Root], good: Sequence[State]) -> State:
        """Return the noised good samples (R, ...) at which the roots start."""
        fresh = start_roots(self._policy, roots, self._config.train.rollout_rows)
        each = zip(roots, good, range(len(roots)), strict=True)
        return stack_states(
            [hints.noised(one, self._policy.sigmas[root.step], tuple(x[i] for x in fresh)) for root, one, i in each]
        )

    def _good_samples(self, prompt: int, row: Row) -> list[State]:
        """Return the good samples of a prompt, states without a batch dimension; [] if it has none."""
        if self._settings.source == "data":
            return [self._encode(name) for name in _pictures_of(row.columns, self._settings.column)]
        return self.winners.get(prompt, [])

    def _encode(self, name: str) -> State:
        assert self._encoder is not None, "it is prepared"
        (latents,) = self._encoder.encode(vae_encoder.fit(conditions.load_file(name), self._encoder.size)[None])
        return (latents[0],)

    def _find_winners(self, batch: Batch) -> list[tuple[int, int, State]]:
        """Return the samples of this process that succeeded without a hint: of each group the latest to remember."""
        won: dict[int, list[State]] = {}
        for end in trunk_ends(batch.tree) if self._settings.source != "data" else ():
            if batch.scores.values[end, self.deciding] >= self._settings.success:
                group = batch.tree.nodes[batch.tree.leaves[end]].root.group
                won.setdefault(group, []).append(tuple(x[end].cpu().clone() for x in batch.tree.samples))
        most = self._settings.winners
        return _list_winners({group: states[-most:] for group, states in won.items()}, batch.groups.prompts)

    def _trials(self, tree: Tree, scores: Scores, prompts: Mapping[int, int]) -> list[Trial]:
        """Return what the hints of each group led to."""
        by_group: dict[int, tuple[int, list[float]]] = {}
        for end in trunk_ends(tree):
            root = tree.nodes[tree.leaves[end]].root
            by_group.setdefault(root.group, (root.step, []))[1].append(float(scores.values[end, self.deciding]))
        return [
            Trial(group, prompts[group], step, sum(value >= self._settings.success for value in values) / len(values))
            for group, (step, values) in by_group.items()
        ]

    def _bounds(self, prompt: int) -> hints.Bounds:
        return self.ladders.get(prompt, hints.start_ladder(len(self._rungs)))

    @property
    def _rungs(self) -> list[int]:
        """Return all rungs of the ladder; an iteration may have fewer, since its plan may not train the last steps."""
        sigmas = self._policy.sigmas
        return hints.find_rungs(sigmas, self._settings.ladder, len(sigmas) - 2)

    def learn(self, everyone: Sequence[Hinted]) -> dict[str, Any]:
        """Move the ladders and remember the winners of an iteration; return its metrics.

        `everyone` are those of all processes. The order of processes changes nothing.
        """
        trials = sorted((trial for each in everyone for trial in each.trials), key=lambda trial: trial.group)
        rungs = self._rungs
        for trial in trials:
            bounds, rung = self._bounds(trial.prompt), rungs.index(trial.step)
            self.ladders[trial.prompt] = hints.climb(bounds, rung, helped=trial.success > 0, rungs=len(rungs))
        for _, prompt, state in sorted((won for each in everyone for won in each.won), key=lambda won: won[0]):
            self.winners[prompt] = [*self.winners.pop(prompt, []), state][-self._settings.winners :]
        while sum(map(len, self.winners.values())) > self._settings.memory:
            oldest = next(iter(self.winners))
            del self.winners[oldest][0]
            if not self.winners[oldest]:
                del self.winners[oldest]
        searched = sum(each.searched for each in everyone)
        line = {"hints/searched": searched, "hints/found": sum(each.found for each in everyone)} if searched else {}
        if not trials:
            return line
        return line | {
            "hints/groups": len(trials),
            "hints/sigma": mean(torch.tensor([self._policy.sigmas[trial.step] for trial in trials])),
            "hints/success": mean(torch.tensor([trial.success for trial in trials])),
        }

    def state(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint."""
        ladders = [[prompt, *bounds] for prompt, bounds in self.ladders.items()]
        order = [[prompt, len(states)] for prompt, states in self.winners.items()]
        numbers = {LADDERS: torch.tensor(ladders).view(-1, 3), ORDER: torch.tensor(order).view(-1, 2)}
        samples = {
            f"{prompt}.{number}.{component}": x
            for prompt, states in self.winners.items()
            for number, state in enumerate(states)
            for component, x in enumerate(state)
        }
        return {name: each.long() for name, each in numbers.items()} | samples

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state`; raise InputError if it is another run's."""
        if not {LADDERS, ORDER} <= state.keys():
            raise InputError(
                "run.resume: the checkpoint holds no state of hints; take algorithm.hints=none, or begin again with "
                "another run.name"
            )
        components = 1 + max((int(name.split(".")[2]) for name in state.keys() - {LADDERS, ORDER}), default=0)
        self.ladders = {prompt: (weak, strong) for prompt, weak, strong in state[LADDERS].tolist()}
        self.winners = {
            prompt: [tuple(state[f"{prompt}.{number}.{part}"] for part in range(components)) for number in range(count)]
            for prompt, count in state[ORDER].tolist()
        }


def search_use(settings: hints.NoHints | hints.Noised) -> SearchUse | None:
    """Return how hints search good samples of a failed prompt; None if they do not.

    Best-of-n is written as a beam without noise and comparisons, which has the states of the samples.
    """
    if settings.name == "none" or settings.source not in ("search", "teacher"):
        return None
    compares = settings.search == "beam"
    return SearchUse(
        name="beam",
        width=settings.width,
        rewards=(),
        keep=(settings.width + 1) // 2,
        level=DEFAULT_LEVELS["flow_sde"] if compares else 0.0,
        compare_at=COMPARE_AT if compares else (),
    )


def separate(units: CreditUnits, tree: Tree) -> CreditUnits:
    """Return the units with the step of their root in the comparison, so that hinted samples are compared apart."""
    steps = {(node.root.group, node.root.index): node.root.step for node in tree.nodes}  # a hinted root comes last
    own = zip(units.comparison[:, 0].tolist(), units.root.tolist(), strict=True)
    return replace(units, comparison=torch.cat([units.comparison, torch.tensor([[steps[each]] for each in own])], 1))


def check_pictures(config: Config, columns: Sequence[Mapping[str, Any]]) -> None:
    """Raise InputError if hints of the source data lack pictures; `columns` has a map per training prompt."""
    settings = config.algorithm.hints
    if settings.name == "none" or settings.source != "data":
        return
    key, column = "algorithm.hints.column", settings.column
    names = dict.fromkeys(name for row in columns for name in _pictures_of(row, column))
    if not names:
        raise InputError(f"{key}: no training prompt has {column!r}, they have {', '.join(columns[0]) or 'no columns'}")
    conditions.check(columns, [column], key)
    for name in names:
        if not isinstance(conditions.load_file(name), Image.Image):
            raise InputError(f"{key}: {column!r} holds {name!r}, which is not the file of a picture")


def _list_winners(found: Mapping[int, Sequence[State]], prompts: Any) -> list[tuple[int, int, State]]:
    return [(group, prompts[group], state) for group, states in found.items() for state in states]


def _pictures_of(columns: Mapping[str, Any], column: str) -> list[Any]:
    given = columns.get(column)
    return given if isinstance(given, list) else [given] if given else []


def _keep_previews(previews: Sequence[StatePreview], replaced: Container[Member]) -> list[StatePreview]:
    """Return the previews of the trees that were not replaced, whose parents are numbered anew."""
    seen: dict[int, list[int | None]] = defaultdict(list)  # group -> new place of each of its previews
    counts: dict[int, int] = defaultdict(int)
    kept = []
    for each in previews:
        group = each.root.group
        stays = (group, each.root.index) not in replaced
        seen[group].append(counts[group] if stays else None)
        if stays:
            counts[group] += 1
            kept.append(each if each.parent is None else replace(each, parent=seen[group][each.parent]))
    return kept
