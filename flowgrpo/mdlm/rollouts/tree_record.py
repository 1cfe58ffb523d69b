"""Records of a rollout's answers for the gallery: how each canvas filled, and its rewards."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
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

    Each answer has its first canvas and `MOMENTS` further ones, at equal distances in its steps. If a decoder masked a
    token again, its last commit counts. `advantages` (B,) and `trained` (B,) bool are those of the answers.
    """
    asked = config.run.trees
    if asked is None or not asked.due(batch.iteration, config.train.iterations):
        return []
    by_group: dict[int, list[int]] = defaultdict(list)
    for place, (group, _) in enumerate(batch.members):
        if group < asked.prompts:
            by_group[group].append(place)
    texts, totals = policy.as_samples(batch.completions), combination.total(batch.scores.values).tolist()
    rewards, advantages, trained = batch.scores.values.tolist(), advantages.tolist(), trained.tolist()
    trees = []
    for group, places in by_group.items():
        nodes: list[KeptNode] = []
        for place in places:
            steps = max(1, 1 + max(texts[place].steps))
            nodes += _chain(texts[place], steps, len(nodes), config.algorithm.decoder.name)
            advantage = finite_or_none(advantages[place])
            nodes[-1] = replace(
                nodes[-1],
                estimated=False,
                rewards=tuple(finite_or_none(value) for value in rewards[place]),
                total=finite_or_none(totals[place]),
                trained=True,
                updated=trained[place] and advantage is not None and finite_or_none(totals[place]) is not None,
                unit=place,
                compared=(group,),
                advantage=advantage,
                weight=float(batch.groups.weights[group]),
            )
        height, width = cells(texts[places[0]], 0, 1).shape[:2]
        tree = KeptTree(
            step=batch.iteration + 1,
            group=group,
            prompt=batch.rows[places[0]].prompt,
            sigmas=tuple(1 - moment / MOMENTS for moment in range(MOMENTS + 1)),
            names=tuple(names),
            size=(width, height),
            nodes=tuple(nodes),
        )
        trees.append(tree)
    return trees


def _chain(text: Text, steps: int, first: int, decoder: str) -> list[KeptNode]:
    """Return the canvases of a text of `steps` steps as a chain of nodes; the first has number `first`."""
    nodes = []
    for column in range(MOMENTS + 1):
        moment = round(steps * column / MOMENTS)
        nodes.append(
            KeptNode(
                parent=first + column - 1 if column else None,
                step=column,
                sigma=sum(step >= moment for step in text.steps) / len(text.steps),
                picture=encode_picture(cells(text, moment, steps)[None]),
                estimated=True,
                text=canvas(text, moment),
                kernel=decoder if column else None,
            )
        )
    return nodes


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
