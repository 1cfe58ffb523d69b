"""The answers of a rollout as a run keeps them to be looked at: how each canvas filled, and what each answer earned."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from flowgrpo.mdlm.config import TextConfig
from flowgrpo.mdlm.policy import TextPolicy
from flowgrpo.mdlm.rollout import Batch
from flowgrpo.training.baseline import Units
from flowgrpo.training.combination import Combination
from flowgrpo.training.kept_trees import KeptNode, KeptTree, Part, known
from flowgrpo.training.samples import Text

MOMENTS = 8  # of a decoding that are shown, beside its start
MASKED = "▢"
CELL = 4  # pixels of a token's cell
EARLY, LATE = (232, 190, 94, 255), (66, 110, 200, 255)  # a cell's colour by when its token was committed
GIVEN, EMPTY = (127, 127, 127, 255), (127, 127, 127, 60)


def parts(
    config: TextConfig,
    policy: TextPolicy,
    combination: Combination,
    batch: Batch,
    *,
    units: Units,
    advantages: torch.Tensor,
    trained: torch.Tensor,
    names: Iterable[str],
) -> list[Part]:
    """What this process has of the answers that are kept of an iteration; nothing where none are.

    A token counts as committed at the step of its last commit, also where a decoder had masked it again before.

    Args:
        combination: of the rewards, into what is trained on.
        advantages: (B,) of the answers.
        trained: (B,) bool, whether each is trained on.
        names: of the rewards.
    """
    asked = config.run.trees
    if asked is None or not asked.due(batch.iteration, config.train.iterations):
        return []
    totals, found = combination.total(batch.scores.values), []
    texts = policy.as_samples(batch.completions)
    steps = 1 + max((step for text in texts for step in text.steps), default=0)
    moments = sorted({round(steps * k / MOMENTS) for k in range(MOMENTS + 1)})
    by_group: dict[int, list[int]] = defaultdict(list)
    for place, (group, _) in enumerate(batch.members):
        if group < asked.prompts:
            by_group[group].append(place)
    for group, own in by_group.items():
        nodes: list[KeptNode] = []
        pictures: list[np.ndarray] = []
        for place in own:
            earned = {
                "trained": True,
                "updated": bool(trained[place] and units.values[place].isfinite().any()),
                "unit": place,
                "compared": (group,),
                "advantage": known(float(advantages[place])),
                "weight": float(batch.groups.weights[group]),
            }
            rewards = tuple(known(value) for value in batch.scores.values[place].tolist())
            for column, moment in enumerate(moments):
                last = column == len(moments) - 1
                scored = {"rewards": rewards, "total": known(float(totals[place]))} if last else {}
                nodes.append(
                    KeptNode(
                        parent=len(nodes) - 1 if column else None,
                        step=column,
                        sigma=1 - moment / steps,
                        role="trunk",
                        tile=len(pictures),
                        estimated=not last,
                        text=canvas(texts[place], moment),
                        kernel=config.algorithm.decoder.name if column else None,
                        **scored,
                        **(earned if last else {}),
                    )
                )
                pictures.append(cells(texts[place], moment, steps))
        tree = KeptTree(
            step=batch.iteration + 1,
            group=group,
            prompt=batch.rows[own[0]].prompt,
            sigmas=tuple(1 - moment / steps for moment in moments),
            names=tuple(names),
            tile=(0, 0),
            nodes=tuple(nodes),
        )
        found.append(Part(tree, pictures))
    return found


def canvas(text: Text, moment: int) -> str:
    """A text as it stood after so many steps, with a sign for each token that was still masked."""
    return "".join(token if step < moment else MASKED for token, step in zip(text.tokens, text.steps, strict=True))


def cells(text: Text, moment: int, steps: int) -> np.ndarray:
    """The tokens of a text after so many steps as cells, uint8 (h, w, 4): two to three times as wide as high."""
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
