"""Views: masked copies of answers, with the tokens to score in each and their weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
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
    """n views of each of B answers."""

    hidden: Tensor  # (n, B, T) bool, tokens that the model sees as masked
    # (n, B, L) float32 weight of each token's log p in the estimate: positive for scored tokens (all hidden), else 0.
    weight: Tensor
    view_weight: Tensor  # (n,) float32 weight of each view, if the estimate is taken as a mean over views; sums to 1
    # (B, L) int64 number of each token's block in a block-causal model; None for full attention.
    blocks: Tensor | None = None

    def of(self, rows: Tensor) -> Views:
        """Select the views of some answers, by their rows (int64)."""
        blocks = None if self.blocks is None else self.blocks[rows]
        return Views(self.hidden[:, rows], self.weight[:, rows], self.view_weight, blocks)

    def once(self, branch: Tensor) -> Views:
        """Score the tokens of each branch in its first answer only; `branch` (B, L) int64 are the branches of the tokens."""
        row = torch.arange(len(branch), device=branch.device)[:, None]
        return replace(self, weight=self.weight * (self._first_row(branch) == row))

    def spread(self, each: Tensor, branch: Tensor, scored: Tensor) -> Tensor:
        """Return values (n, B, L) of tokens for every answer of their branch, from views that score them once.

        `each` (n, B, L) has the values where the views score them; `scored` (B, L) bool are the tokens of every answer. 0
        elsewhere.
        """
        first = self._first_row(branch)
        known = scored & (first < len(branch))
        column = torch.arange(branch.shape[1], device=branch.device)
        return each[:, first.clamp(max=len(branch) - 1), column].where(known, 0.0)

    def _first_row(self, branch: Tensor) -> Tensor:
        """Return the first row (B, L) that scores the token of a branch; B if none does."""
        place, count = _places(branch)
        row = torch.arange(len(branch), device=branch.device)[:, None].where(self.scored.any(0), len(branch))
        first = row.new_full((count,), len(branch))
        return first.scatter_reduce_(0, place.flatten(), row.flatten(), "amin")[place]

    def carried(self, token_weight: Tensor, branch: Tensor) -> Tensor:
        """Return the weights (B, L) of views that score the tokens of a branch once: the sum over its answers, else 0."""
        place, count = _places(branch)
        total = token_weight.new_zeros(count).index_add(0, place.flatten(), token_weight.flatten())
        return total[place] * self.scored.any(0)

    @property
    def scored(self) -> Tensor:
        """(n, B, L) bool: tokens that each view scores."""
        return self.weight > 0

    @property
    def disjoint(self) -> bool:
        """True if no two views score the same token, so that a loss over tokens is a sum over views."""
        return bool((self.scored.sum(0) <= 1).all())

    @property
    def first(self) -> Tensor:
        """(B, L) int64: number of the first view that scores each token, which stands for its step; 0 if no view scores it.

        In a block-causal model a view scores one step of each block, so each block has its own numbers.
        """
        first = self.scored.int().argmax(0)
        return first if self.blocks is None else first + len(self.weight) * self.blocks


def _places(branch: Tensor) -> tuple[Tensor, int]:
    """Return a number (B, L) for each token of each branch, and how many numbers there may be."""
    place = branch * branch.shape[1] + torch.arange(branch.shape[1], device=branch.device)
    return place, int(place.max()) + 1 if len(place) else 0


def token_draws(answers: Answers, name: str) -> Tensor:
    """Return a uniform random number for each token: float64 (B, L) in [0, 1), on the CPU, at the address of its row."""
    return noise.uniforms([(*address, name) for address in answers.addresses], answers.scored.shape[1])


def nothing_scored(answers: Answers, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return arrays `hidden` and `weight` of `count` views that score nothing and hide the tokens that are never scored."""
    hidden = np.zeros((count, *answers.ids.shape), dtype=bool)
    hidden[:, :, answers.prompt_length :] = ~answers.scored.cpu().numpy()
    return hidden, np.zeros((count, *answers.scored.shape), dtype=np.float32)


def scored_rows(answers: Answers, name: str) -> Iterator[tuple[int, np.random.Generator, np.ndarray]]:
    """Yield for each row with scored tokens: its number, its random generator, and the positions of the scored tokens."""
    scored = answers.scored.cpu().numpy()
    for row, address in enumerate(answers.addresses):
        if scored[row].any():
            yield row, noise.generator(*address, name), scored[row].nonzero()[0]


def score(hidden: np.ndarray, weight: np.ndarray, where: tuple[int, int, np.ndarray], value: float) -> None:
    """Hide the tokens at `where` (view, row, positions in the completion), and score them with weight `value`."""
    view, row, positions = where
    hidden[view, row, positions + hidden.shape[2] - weight.shape[2]] = True
    weight[view, row, positions] = value


def hide_prompt(
    answers: Answers, hidden: np.ndarray, *, view: int, row: int, random: np.random.Generator, rate: float
) -> None:
    """Hide each token of a row's prompt with probability `rate`."""
    positions = answers.attention_mask[row, : answers.prompt_length].cpu().numpy().nonzero()[0]
    hidden[view, row, positions] = random.random(len(positions)) < rate


def finished(answers: Answers, hidden: np.ndarray, weight: np.ndarray, view_weight: np.ndarray | None = None) -> Views:
    """Build the views from their arrays, and show all given tokens; `view_weight` is uniform by default."""
    hidden[:, :, answers.prompt_length :] &= ~answers.given.cpu().numpy()
    view_weight = np.full(len(hidden), 1 / len(hidden)) if view_weight is None else view_weight
    arrays = (hidden, weight, view_weight.astype(np.float32))
    hides, weighs, shares = (torch.from_numpy(array).to(answers.ids.device) for array in arrays)
    return Views(hides, weighs, shares, answers.blocks)
