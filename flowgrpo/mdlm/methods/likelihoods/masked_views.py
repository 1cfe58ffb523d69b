"""Views: masked copies of answers, and which of their tokens are scored with which weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowgrpo.mdlm.methods.likelihoods.answers import Answers
from flowgrpo.schema.imports.heavy import Tensor, np, torch
from flowgrpo.schema.imports.lazy import lazy

if TYPE_CHECKING:
    from samplers import noise
else:
    noise = lazy("samplers.noise")


@dataclass(frozen=True)
class Views:
    """n views of each of B answers.

    Attributes:
        hidden: (n, B, T) bool, tokens the model sees as masked.
        weight: (n, B, L) float32 weight of each l_i in the estimate; positive where a token is scored, 0 elsewhere. Scored
            tokens are hidden ones.
        view_weight: (n,) float32 of each view in the estimate as a mean over views; sums to 1.
        blocks: (B, L) int64 number of each token's block in a block-causal model; None for full attention.
    """

    hidden: Tensor
    weight: Tensor
    view_weight: Tensor
    blocks: Tensor | None = None

    def of(self, rows: Tensor) -> Views:
        """The views of some of the answers, by their rows (int64)."""
        blocks = None if self.blocks is None else self.blocks[rows]
        return Views(self.hidden[:, rows], self.weight[:, rows], self.view_weight, blocks)

    @property
    def scored(self) -> Tensor:
        """(n, B, L) bool: whose log-probability is taken where."""
        return self.weight > 0

    @property
    def disjoint(self) -> bool:
        """Whether no token is scored by two views, so that a loss over tokens is a sum over views."""
        return bool((self.scored.sum(0) <= 1).all())

    @property
    def first(self) -> Tensor:
        """(B, L) int64: the first view that scores each token, for a mean over steps; 0 where none does.

        In a block-causal model it is numbered anew in each block, for there it is another step.
        """
        found = self.scored.int().argmax(0)
        return found if self.blocks is None else found + len(self.weight) * self.blocks


def nothing_scored(answers: Answers, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Hidden tokens and weights of so many views where nothing is scored yet and what never will be is hidden."""
    hidden = np.zeros((count, *answers.ids.shape), dtype=bool)
    hidden[:, :, answers.prompt_length :] = ~answers.scored.cpu().numpy()
    return hidden, np.zeros((count, *answers.scored.shape), dtype=np.float32)


def scored_rows(answers: Answers, name: str) -> Iterator[tuple[int, np.random.Generator, np.ndarray]]:
    """Of each row with scored tokens: its number, its source of randomness, and the positions of those tokens."""
    scored = answers.scored.cpu().numpy()
    for row, address in enumerate(answers.addresses):
        if scored[row].any():
            yield row, noise.generator(*address, name), scored[row].nonzero()[0]


def score(hidden: np.ndarray, weight: np.ndarray, where: tuple[int, int, np.ndarray], value: float) -> None:
    """Hide and score some tokens.

    Args:
        where: the view, the row, and the tokens' positions in the completion.
        value: their weight.
    """
    view, row, positions = where
    hidden[view, row, positions + hidden.shape[2] - weight.shape[2]] = True
    weight[view, row, positions] = value


def hide_prompt(
    answers: Answers, hidden: np.ndarray, *, view: int, row: int, random: np.random.Generator, rate: float
) -> None:
    """Hide each token of a row's prompt with a probability."""
    own = answers.attention_mask[row, : answers.prompt_length].cpu().numpy().nonzero()[0]
    hidden[view, row, own] = random.random(len(own)) < rate


def finished(answers: Answers, hidden: np.ndarray, weight: np.ndarray, view_weight: np.ndarray | None = None) -> Views:
    """The views; a token that was given is seen whatever the plan said."""
    hidden[:, :, answers.prompt_length :] &= ~answers.given.cpu().numpy()
    view_weight = np.full(len(hidden), 1 / len(hidden)) if view_weight is None else view_weight
    arrays = (hidden, weight, view_weight.astype(np.float32))
    hides, weighs, shares = (torch.from_numpy(array).to(answers.ids.device) for array in arrays)
    return Views(hides, weighs, shares, answers.blocks)
