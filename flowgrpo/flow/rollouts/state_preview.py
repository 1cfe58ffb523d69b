"""Pictures of the states of a rollout's trees.

A state is shown by the clean sample that the model foretells from it, x - sigma v, in the evaluation that the rollout makes
of it anyway; a leaf by its sample. Both are scored, so that it can be said at which step a reward came about.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace

import numpy as np
import torch
from PIL import Image

from flowgrpo.data.prompts import Row
from flowgrpo.flow.config import Config
from flowgrpo.flow.pipeline.policy import Policy
from flowgrpo.training.run.phases import phase
from flowgrpo.training.run.random_states import random_state_kept
from flowgrpo.training.scoring.scorer import Scorer, Scores, unheard
from rewards import Reward
from samplers.batches import batched
from samplers.finishes import Finish
from samplers.kernels import State
from samplers.trees import Evaluate, Root, Tree, stacked

BARS = 40  # of the loudness of a sound
GREY = (127, 127, 127, 255)  # of them, which can be seen on light and on dark


class Foretold:
    """The model, and what it foretells of some rows while trees grow by it.

    Attributes:
        by_call: of each call in its order, the clean samples of those rows by their places in it, on the host.
    """

    def __init__(self, evaluate: Evaluate, rows: Sequence[Row]):
        self._evaluate, self._rows = evaluate, {id(row) for row in rows}
        self.by_call: list[dict[int, State]] = []

    def __call__(self, state: State, sigma: float, rows: Sequence[Row]) -> State:
        """As the model."""
        velocity = self._evaluate(state, sigma, rows)
        own = [i for i, row in enumerate(rows) if id(row) in self._rows]
        clean = [
            (x[own] - sigma * v[own].detach().float()).to(x.dtype).cpu() for x, v in zip(state, velocity, strict=True)
        ]
        self.by_call.append({i: tuple(x[place] for x in clean) for place, i in enumerate(own)})
        return velocity

    def passing(self, finish: Finish) -> Finish:
        """What finishes trees while they are watched: what its steps pass is not known."""

        def finished(state: State, sigmas: Sequence[float], rows: Sequence[Row]) -> State:
            self.by_call += [{} for _ in sigmas[1:]]
            return finish(state, sigmas, rows)

        return finished


@dataclass(frozen=True)
class StatePreview:
    """A state as it is kept.

    Attributes:
        node: of the tree that it is; None of one that a solver passed on its way.
        parent: its place among the previews of its group.
        step: how many steps of the schedule lie before it.
        estimated: whether what is shown is foretold, not sampled.
        state: what is shown, before it is decoded; None where nothing is known of it.
        picture: uint8 (h, w, 4); None as `state`.
        rewards: (R,) of what is shown; None where it was not scored.
    """

    node: int | None
    parent: int | None
    step: int
    root: Root
    _: KW_ONLY
    estimated: bool
    state: State | None = None
    picture: np.ndarray | None = None
    rewards: torch.Tensor | None = None


@dataclass(frozen=True)
class StatePreviews:
    """Makes the previews of the trees that `run.trees` asks for."""

    config: Config
    policy: Policy
    rewards: Sequence[Reward]

    def watch(self, iteration: int, roots: Sequence[Root]) -> Foretold | None:
        """What stands for the policy's velocity while the trees of an iteration grow; None where none of them is kept."""
        asked = self.config.run.trees
        if asked is None or iteration < 0 or not asked.due(iteration, self.config.train.iterations):
            return None
        return Foretold(self.policy.velocity, [root.row for root in roots if root.group < asked.prompts])

    @torch.no_grad()
    def of(self, tree: Tree, scores: Scores, foretold: Foretold | None, *, leads: bool = True) -> list[StatePreview]:
        """What the kept states look like, parents before children; nothing where nothing was watched.

        What is foretold is scored unless a reward compares the samples of a group, for it would need one of them. Calls are
        as large as those of the rollout.

        Args:
            leads: whether this process scores for those that make its samples with it.
        """
        asked = self.config.run.trees
        if foretold is None or asked is None:
            return []
        found = _states(tree, foretold, asked.prompts)
        leaves: dict[int | None, int] = {node: index for index, node in enumerate(tree.leaves)}
        scored = leads and asked.score and not any(reward.group_wise for reward in self.rewards)
        shown: dict[tuple[int, bool], list[int]] = defaultdict(list)  # by group, and whether it is foretold
        for place, each in enumerate(found):
            if each.state is not None:
                shown[each.root.group, each.estimated].append(place)
        decoding = phase("decoding", sum(map(len, shown.values())))
        # Rewards are asked for pictures alone: a failure loses no sample, and what they draw changes nothing.
        with decoding as told, random_state_kept(), unheard(), Scorer(self.rewards) as scorer:
            for (group, estimated), places in shown.items():
                most = min(self.config.train.rollout_rows, max(1, len(shown[group, False])))
                for own in batched(places, most):
                    rows = [found[i].root.row for i in own]
                    states = [state for i in own if (state := found[i].state) is not None]  # all
                    state = tuple(x.to(tree.samples[0].device) for x in stacked(states))
                    samples = self.policy.decode(state, rows)
                    if not estimated:
                        rewards = scores.values[[leaves[found[i].node] for i in own]]
                    else:
                        rewards = scorer.submit(samples, rows)().values if scored else [None] * len(own)
                    for i, sample, of_sample in zip(own, samples, rewards, strict=True):
                        found[i] = replace(found[i], state=None, picture=small(sample, asked.side), rewards=of_sample)
                    told.advance(len(own))
        return found


def _states(tree: Tree, foretold: Foretold, groups: int) -> list[StatePreview]:
    """The states of the first groups, parents before children, with those that a solver passed between two nodes."""
    estimates = estimates_by_state(tree, foretold)
    foretold.by_call.clear()
    leaves = {node: index for index, node in enumerate(tree.leaves)}
    places: dict[int, int] = {}
    found: list[StatePreview] = []
    counts: dict[int, int] = defaultdict(int)

    def add(preview: StatePreview) -> int:
        found.append(preview)
        counts[preview.root.group] += 1
        return counts[preview.root.group] - 1

    for i, node in enumerate(tree.nodes):
        if node.root.group >= groups:
            continue
        parent = None
        if node.parent is not None:
            parent = places[node.parent]
            for step in range(tree.nodes[node.parent].step + 1, node.step):
                if (passed := estimates.get((node.parent, step))) is not None:
                    parent = add(StatePreview(None, parent, step, node.root, estimated=True, state=passed))
        leaf = leaves.get(i)
        state = estimates.get((i, node.step)) if leaf is None else tuple(x[leaf].cpu() for x in tree.samples)
        places[i] = add(StatePreview(i, parent, node.step, node.root, estimated=leaf is None, state=state))
    return found


def estimates_by_state(tree: Tree, foretold: Foretold) -> dict[tuple[int, int], State]:
    """What was foretold, by the node that an evaluation was of, or that the chain left, and the step of the schedule."""
    steps = {sigma: step for step, sigma in enumerate(tree.sigmas)}
    roots = {id(node.root.row): i for i, node in enumerate(tree.nodes) if node.parent is None}
    found = {}
    for evaluation, seen in zip(tree.evaluations, foretold.by_call, strict=True):
        nodes = {  # by row, of a tree that was grown
            row: tree.nodes[child].parent
            for edges in evaluation.edges
            for row, child in zip(edges.rows.tolist(), edges.nodes.tolist(), strict=True)
        }
        for row, state in seen.items():
            node = nodes[row] if nodes else roots[id(evaluation.rows[row])]
            found[node, steps[evaluation.sigma]] = state
    return found


def small(sample: torch.Tensor, side: int) -> np.ndarray:
    """A small picture uint8 (h, w, 4) of a sample: of a video its middle frame, of a sound its loudness over time.

    Args:
        sample: as `training.reports.samples.save_sample` takes it.
        side: longest side, pixels; a smaller picture stays as it is.
    """
    sample = sample.detach().float().cpu().nan_to_num()
    if sample.ndim == 2:
        return _loudness(sample, side)
    frame = sample[len(sample) // 2] if sample.ndim == 4 else sample
    picture = Image.fromarray(frame.mul(255).round().clamp(0, 255).byte().movedim(0, -1).numpy()).convert("RGBA")
    picture.thumbnail((side, side))
    return np.asarray(picture)


def _loudness(sound: torch.Tensor, side: int) -> np.ndarray:
    """The peaks of a sound (C, N) as upright bars."""
    canvas = np.zeros((side // 2, side, 4), dtype=np.uint8)
    middle, width = side // 4, max(1, side // BARS)
    for i, part in enumerate(np.array_split(sound.abs().amax(0).numpy(), side // width)):
        height = max(1, round(middle * min(1.0, float(part.max(initial=0)))))
        canvas[middle - height : middle + height, i * width : i * width + max(1, width - 1)] = GREY
    return canvas
