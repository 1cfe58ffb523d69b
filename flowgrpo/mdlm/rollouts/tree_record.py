"""Records of a rollout's answers for the gallery: how each canvas filled, and its rewards."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from flowgrpo.mdlm.config import TextConfig
from flowgrpo.mdlm.policy import TextPolicy
from flowgrpo.mdlm.rollouts.rollout import Batch
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.advantages.reward_combination import Combination
from flowgrpo.training.reports.samples import Text
from flowgrpo.training.reports.tree_store import KeptNode, KeptTree, encode_picture, finite_or_none

MOMENTS = 8  # recorded canvases of an answer, besides the start
MASKED = "▢"
CELL = 4  # pixels of a token's cell
EARLY, LATE = (232, 190, 94, 255), (66, 110, 200, 255)  # a cell's colour by when its token was committed
GIVEN, EMPTY = (127, 127, 127, 255), (127, 127, 127, 60)


def build_kept_trees(
    config: TextConfig,
    policy: TextPolicy,
    combination: Combination,
    batch: Batch,
    *,
    units: CreditUnits,
    advantages: torch.Tensor,
    trained: torch.Tensor,
    names: Iterable[str],
) -> list[KeptTree]:
    """Return records of this process's answers in the first `run.trees.prompts` groups; [] if the iteration is not due.

    Each answer has its first canvas and `MOMENTS` further ones, at equal distances in its steps; in a tree, between its
    splits. Answers share the canvases of a branch. If a decoder masked a token again, its last commit counts. `advantages`
    (U,) and `trained` (U,) bool are those of the units.
    """
    asked = config.run.trees
    if asked is None or not asked.due(batch.iteration, config.train.iterations):
        return []
    by_group: dict[int, list[int]] = defaultdict(list)
    for place, (group, _) in enumerate(batch.members):
        if group < asked.prompts:
            by_group[group].append(place)
    texts, totals = policy.as_samples(batch.completions), combination.total(batch.scores.values).tolist()
    rewards, values = batch.scores.values.tolist(), units.values.isfinite().any(1).tolist()
    of_branches = config.algorithm.credit.of_branches(units, batch.earned(combination)).tolist()
    compared = units.comparison.tolist()
    trees, last = [], _columns(config.algorithm.tree.splits, batch)[-1]
    for group, places in by_group.items():
        nodes: list[KeptNode] = []
        known: dict[tuple[int, int], int] = {}  # (edge, column) -> node; one start for the answers of a tree
        for place in places:
            text, parent = texts[place], None
            for column, edge, moment, steps, unit in _canvases(
                config, batch, text, place=place, units=of_branches[place]
            ):
                node = known.setdefault((edge, column), len(nodes))
                if node == len(nodes):
                    state = _node(text, moment, steps, column=column, parent=parent)
                    nodes.append(replace(state, kernel=config.algorithm.decoder.name if column else None))
                    if unit >= 0:
                        advantage = finite_or_none(float(advantages[unit]))
                        nodes[-1] = replace(
                            nodes[-1],
                            trained=True,
                            updated=bool(trained[unit]) and advantage is not None and values[unit],
                            unit=unit,
                            compared=tuple(compared[unit]),
                            advantage=advantage,
                            weight=float(batch.groups.weights[group]),
                        )
                parent = node
            nodes[-1] = replace(
                nodes[-1],
                estimated=False,
                rewards=tuple(finite_or_none(value) for value in rewards[place]),
                total=finite_or_none(totals[place]),
            )
        height, width = cells(texts[places[0]], 0, 1).shape[:2]
        tree = KeptTree(
            step=batch.iteration + 1,
            group=group,
            prompt=batch.rows[places[0]].prompt,
            sigmas=tuple(1 - column / last for column in range(last + 1)),
            names=tuple(names),
            size=(width, height),
            nodes=tuple(nodes),
        )
        trees.append(tree)
    return trees


def _canvases(
    config: TextConfig, batch: Batch, text: Text, *, place: int, units: Sequence[int]
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the canvases of an answer: column, edge (below 0: the start), step, all steps, and the branch's unit or -1."""
    edges, steps = batch.branches.edge[place].tolist(), max(1, 1 + max(text.steps))
    borders = [0, *(min(steps, step) for step in batch.completions.rollout.branched[place].tolist()), steps]
    columns = _columns(config.algorithm.tree.splits, batch)
    yield 0, -1 - batch.branches.paths.lines[place][-1], 0, steps, -1
    first = 0
    for level, last in enumerate(columns):
        for column in range(first + 1, last + 1):
            done = (column - first) / (last - first)
            moment = round(borders[level] + (borders[level + 1] - borders[level]) * done)
            yield column, edges[level], moment, steps, units[level]
        first = last


def _columns(splits: Sequence[float], batch: Batch) -> list[int]:
    """Return the column of each split, different ones above 0, and the last column; equal parts if branches chose places."""
    depth = batch.completions.rollout.branched.shape[1]
    if depth < len(splits):
        splits = [(number + 1) / (depth + 1) for number in range(depth)]
    last, columns = max(MOMENTS, len(splits) + 1), [0]
    for place, share in enumerate(splits):
        columns.append(min(max(round(last * share), columns[-1] + 1), last - len(splits) + place))
    return [*columns[1:], last]


def _node(text: Text, moment: int, steps: int, *, column: int, parent: int | None) -> KeptNode:
    """Return the canvas of a text before step `moment` of `steps`."""
    return KeptNode(
        parent=parent,
        step=column,
        sigma=sum(step >= moment for step in text.steps) / len(text.steps),
        picture=encode_picture(cells(text, moment, steps)[None]),
        estimated=True,
        text=canvas(text, moment),
    )


def canvas(text: Text, moment: int) -> str:
    """Return a text after `moment` steps, with `MASKED` for masks; a run of equal tokens at its end is shown as "×n"."""
    tokens = [token if step < moment else MASKED for token, step in zip(text.tokens, text.steps, strict=True)]
    alike = next((i for i, token in enumerate(reversed(tokens)) if token != tokens[-1]), len(tokens))
    return "".join(tokens[: len(tokens) - alike + 1]) + (f" ×{alike}" if alike > 1 else "")


def cells(text: Text, moment: int, steps: int) -> np.ndarray:
    """Draw the tokens of a text after `moment` steps as cells: RGBA uint8 (h, w, 4), at least twice as wide as high."""
    columns = max(1, 2 * math.ceil(math.sqrt(len(text.steps) / 2)))
    rows = -(-len(text.steps) // columns)
    picture = np.zeros((rows * CELL, columns * CELL, 4), dtype=np.uint8)
    for place, step in enumerate(text.steps):
        row, column = divmod(place, columns)
        cell = picture[row * CELL : (row + 1) * CELL - 1, column * CELL : (column + 1) * CELL - 1]
        cell[:] = _colour(step, moment, steps)
    return picture


def _colour(step: int, moment: int, steps: int) -> Sequence[int]:
    if step >= moment:
        return EMPTY
    if step < 0:
        return GIVEN
    late = step / max(1, steps - 1)
    return [round((1 - late) * early + late * end) for early, end in zip(EARLY, LATE, strict=True)]
