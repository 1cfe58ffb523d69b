"""Previews: pictures of the states of a rollout's trees.

The picture of a state shows the model's clean estimate x - sigma v, from the rollout's own evaluation. The picture of a
leaf shows its sample. Both are scored, to show the step at which a reward arises.
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
from flowgrpo.training.run.random_states import preserve_random_state
from flowgrpo.training.scoring.scorer import Scorer, Scores, unheard
from rewards import Reward
from rewards.audio import Films, tensors
from samplers.batches import batched
from samplers.growth import Finish
from samplers.kernels import State
from samplers.trees import Evaluate, Root, Tree, stack_states

FRAMES = 17  # most frames of a preview
BARS = 40  # number of bars in the picture of a sound
GREY = (127, 127, 127, 255)  # RGBA of the bars, visible on light and dark pages


class EstimateRecorder:
    """A velocity function that records the model's clean estimates for the given rows while trees grow.

    `by_call` has one dict for each call: row index in the call -> clean estimate on the CPU. `sigmas` are those of the
    calls that are recorded, None for all; the others have an empty dict. `device` is that of the model's states.
    """

    device: torch.device

    def __init__(self, evaluate: Evaluate, rows: Sequence[Row], sigmas: Sequence[float] | None = None):
        self._evaluate, self._rows, self._sigmas = evaluate, {id(row) for row in rows}, sigmas
        self.by_call: list[dict[int, State]] = []

    def __call__(self, state: State, sigma: float, rows: Sequence[Row]) -> State:
        """Return the model's velocity, and record the estimates."""
        velocity, self.device = self._evaluate(state, sigma, rows), state[0].device
        if self._sigmas is not None and sigma not in self._sigmas:
            self.by_call.append({})
            return velocity
        watched = [i for i, row in enumerate(rows) if id(row) in self._rows]
        clean = [
            (x[watched] - sigma * v[watched].detach().float()).to(x.dtype).cpu()
            for x, v in zip(state, velocity, strict=True)
        ]
        self.by_call.append({i: tuple(x[place] for x in clean) for place, i in enumerate(watched)})
        return velocity

    def recording(self, finish: Finish) -> Finish:
        """Return `finish` wrapped so that each of its steps adds an empty dict to `by_call`."""

        def recorded_finish(state: State, sigmas: Sequence[float], rows: Sequence[Row]) -> State:
            self.by_call += [{} for _ in sigmas[1:]]
            return finish(state, sigmas, rows)

        return recorded_finish


@dataclass(frozen=True)
class StatePreview:
    """A recorded state of a tree, with its picture and the picture's rewards; unknown fields are None.

    Attributes:
        node: index of the tree's node.
        parent: index of the parent among the previews of the group.
        estimated: whether the picture shows a clean estimate, not a sample.
        state: latents of the picture, until they are decoded.
        picture: uint8 (F, h, w, 4), a film if it has several frames.
        rewards: (R,)
    """

    node: int
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
    """Maker of previews for the trees that `run.trees` selects."""

    config: Config
    policy: Policy
    rewards: Sequence[Reward]

    def watch(self, iteration: int, roots: Sequence[Root]) -> EstimateRecorder | None:
        """Return a recording velocity function for the trees of an iteration; None if none of its trees is kept."""
        settings = self.config.run.trees
        if settings is None or iteration < 0 or not settings.due(iteration, self.config.train.iterations):
            return None
        return EstimateRecorder(self.policy.velocity, [root.row for root in roots if root.group < settings.prompts])

    @torch.no_grad()
    def of(
        self, tree: Tree, scores: Scores, recorder: EstimateRecorder | None, *, leads: bool = True
    ) -> list[StatePreview]:
        """Return the previews of the kept trees, parents before children; [] without a recording.

        The process that `leads` the scoring also scores the estimates, unless a reward compares the samples of a group.
        Decoding batches are at most as large as the rollout's.
        """
        settings = self.config.run.trees
        if recorder is None or settings is None:
            return []
        previews = _collect_states(tree, recorder, settings.prompts)
        leaves: dict[int, int] = {node: index for index, node in enumerate(tree.leaves)}
        scored = leads and settings.score and not any(reward.group_wise for reward in self.rewards)
        shown: dict[tuple[int, bool], list[int]] = defaultdict(list)  # by group and whether estimated
        for place, each in enumerate(previews):
            if each.state is not None:
                shown[each.root.group, each.estimated].append(place)
        decoding = phase("decoding", sum(map(len, shown.values())))
        # These rewards are only shown: a failure loses no sample, and their random draws change nothing.
        with decoding as progress, preserve_random_state(), unheard(), Scorer(self.rewards) as scorer:
            for (group, estimated), places in shown.items():
                most = min(self.config.train.rollout_rows, max(1, len(shown.get((group, False), ()))))
                for batch in batched(places, most):
                    rows = [previews[i].root.row for i in batch]
                    states = [state for i in batch if (state := previews[i].state) is not None]  # none is left out
                    state = tuple(x.to(recorder.device) for x in stack_states(states))
                    samples = self.policy.decode(state, rows)
                    if not estimated:
                        rewards = scores.values[[leaves[previews[i].node] for i in batch]]
                    else:
                        rewards = scorer.submit(samples, rows)().values if scored else [None] * len(batch)
                    for i, sample, of_sample in zip(batch, samples, rewards, strict=True):
                        previews[i] = replace(
                            previews[i], state=None, picture=small(sample, settings.side), rewards=of_sample
                        )
                    progress.advance(len(batch))
        return previews


def _collect_states(tree: Tree, recorder: EstimateRecorder, groups: int) -> list[StatePreview]:
    """Return the states of the first groups, parents first."""
    estimates = estimates_by_node(tree, recorder)
    recorder.by_call.clear()
    leaves = {node: index for index, node in enumerate(tree.leaves)}
    places: dict[int, int] = {}
    previews: list[StatePreview] = []
    counts: dict[int, int] = defaultdict(int)

    for i, node in enumerate(tree.nodes):
        if node.root.group >= groups:
            continue
        parent = None if node.parent is None else places[node.parent]
        leaf = leaves.get(i)
        state = estimates.get(i) if leaf is None else tuple(x[leaf].cpu() for x in tree.samples)
        places[i] = counts[node.root.group]
        counts[node.root.group] += 1
        previews.append(StatePreview(i, parent, node.step, node.root, estimated=leaf is None, state=state))
    return previews


def estimates_by_node(tree: Tree, recorder: EstimateRecorder) -> dict[int, State]:
    """Return the clean estimate of each node that has one."""
    estimates: dict[int, State] = {}
    for evaluation, states in zip(tree.evaluations, recorder.by_call, strict=True):
        nodes = {  # by row
            row: tree.nodes[child].parent
            for edges in evaluation.edges
            for row, child in zip(edges.rows.tolist(), edges.nodes.tolist(), strict=True)
        }
        estimates |= {nodes[row]: state for row, state in states.items()}
    return estimates


def small(sample: torch.Tensor | Films, side: int) -> np.ndarray:
    """Return small frames uint8 (F, h, w, 4) of a sample: a video's, at most `FRAMES`, or one of an image or a sound.

    The sample has a format of `training.reports.samples.save_sample`. A sound is drawn by its loudness. The longer side of a
    frame is at most `side` pixels; smaller frames keep their size.
    """
    sample = tensors(sample)[0].detach().float().cpu().nan_to_num()
    if sample.ndim == 2:
        return _draw_loudness(sample, side)[None]
    frames = sample if sample.ndim == 4 else sample[None]
    chosen = torch.linspace(0, len(frames) - 1, min(len(frames), FRAMES)).round().long()
    pixels = frames[chosen].mul(255).round().clamp(0, 255).byte().movedim(1, -1).numpy()
    pictures = [Image.fromarray(frame).convert("RGBA") for frame in pixels]
    for picture in pictures:
        picture.thumbnail((side, side))
    return np.stack([np.asarray(picture) for picture in pictures])


def _draw_loudness(sound: torch.Tensor, side: int) -> np.ndarray:
    """Draw the amplitude of a sound (C, N) over time as vertical bars."""
    canvas = np.zeros((side // 2, side, 4), dtype=np.uint8)
    middle, width = side // 4, max(1, side // BARS)
    for i, part in enumerate(np.array_split(sound.abs().amax(0).numpy(), side // width)):
        height = max(1, round(middle * min(1.0, float(part.max(initial=0)))))
        canvas[middle - height : middle + height, i * width : i * width + max(1, width - 1)] = GREY
    return canvas
