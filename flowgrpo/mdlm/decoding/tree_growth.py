"""Growth of a decode's trees: which rows are decoded, from which canvases and caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol

from flowgrpo.mdlm.decoding.tokens.branching import END, START, Branching, Place
from flowgrpo.schema.imports.heavy import Tensor, torch

if TYPE_CHECKING:
    from flowgrpo.mdlm.decoding.network.kv_cache import Cache


@dataclass(kw_only=True)
class Canvases:
    """Partly decoded rows, and the records of their decode; see `flowgrpo.mdlm.decoding.decode.Rollout`."""

    ids: Tensor
    mask: Tensor
    step_map: Tensor
    commit_logp: Tensor
    steps: Tensor
    drafts: Tensor

    def of(self, rows: Tensor) -> Canvases:
        """Return copies of some rows."""
        return Canvases(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def put(self, rows: Tensor, part: Canvases) -> None:
        """Replace some rows."""
        for field in fields(self):
            getattr(self, field.name)[rows] = getattr(part, field.name)


class Fill(Protocol):
    """A function that decodes some rows in place, from one place up to another."""

    def __call__(
        self, canvases: Canvases, *, rows: Tensor, same: Tensor, span: tuple[Place, Place], cache: Cache | None
    ) -> None:
        """Decode from the first place of `span` up to the second; `rows` (R,) are the numbers of the rows.

        Rows of equal `same` (R,) begin with the same canvas: their first step is evaluated once.
        """


class Landed(Protocol):
    """A function that is called while rows are decoded, each time that some are finished."""

    def __call__(self, canvases: Canvases, done: int) -> None:
        """Take the canvases of all rows, of which the first `done` are finished."""


@dataclass(kw_only=True)
class TreeGrowth:
    """The trees of a decode. The first row of a branch leads it: only this row is decoded until the branch splits."""

    branching: Branching
    micro_batch: int  # most rows that are decoded together
    fill: Fill
    entropy: Callable[[Canvases, int], Tensor]  # mean entropy (R,) of the masked tokens of a block, in nats
    canvases: Canvases  # of all rows
    left: Tensor  # (B,) splits that each row has still before it
    branched: Tensor  # (B, S) steps that each row had taken at each split of its tree
    landed: Landed | None = None  # branches grow depth first, so that rows finish in their order

    def grow(self, rows: Tensor, same: Tensor, cache: Cache | None, passed: int = 0) -> None:
        """Decode branches from the place number `passed` to their leaves, depth first, so that few caches are kept.

        `rows` (R,) ascending lead them. Each begins with the canvas of a row `same` (R,), which `cache` knows.
        """
        places = (START, *self.branching.places, END)
        for call in split_calls(same, self.micro_batch):
            leads, own = rows[call], self.canvases.of(rows[call])
            used = None if cache is None else cache.branch()
            self.fill(own, rows=leads, same=same[call], span=(places[passed], places[passed + 1]), cache=used)
            self.canvases.put(leads, own)
            if passed < len(self.branching.places):
                used = None if used is None else used.branch()  # frees what the branches do not go on with
                self.grow(*self._split(leads, own, passed), used, passed + 1)
            elif self.landed is not None:
                self.landed(self.canvases, int(leads[-1]) + 1)

    def _split(self, rows: Tensor, canvases: Canvases, passed: int) -> tuple[Tensor, Tensor]:
        """Split branches at a place; return the rows (N,) that lead from there on, and the row (N,) that led each before."""
        splits = self._splits(rows, canvases, passed)
        number = torch.arange(len(self.left), device=rows.device)
        first = number - number % self.branching.factor**self.left
        leaves = torch.isin(first, rows).nonzero()[:, 0]
        branch = torch.searchsorted(rows, first[leaves])
        self.canvases.put(leaves, canvases.of(branch))
        parted = leaves[splits[branch]]
        self.branched[parted, self.branching.depth - self.left[parted]] = self.canvases.steps[parted]
        self.left[parted] -= 1
        leads = leaves[leaves % self.branching.factor ** self.left[leaves] == 0]
        return leads, first[leads]

    def _splits(self, rows: Tensor, canvases: Canvases, passed: int) -> Tensor:
        """Return which branches (R,) bool split at a place."""
        left = self.left[rows]
        if self.branching.entropy is None:
            return left > 0
        after = len(self.branching.places) - passed - 1  # places behind this one
        splits = left > after
        waits = ((left > 0) & ~splits).nonzero()[:, 0]
        if len(waits):
            entropy = self.entropy(canvases.of(waits), self.branching.places[passed][0])
            splits[waits] = entropy >= self.branching.entropy
        return splits


def split_calls(same: Tensor, most: int) -> Iterator[slice]:
    """Yield the rows of calls of at most `most` rows; rows of equal `same` (R,) ascending share a call if they fit one."""
    first = last = 0
    for size in same.unique_consecutive(return_counts=True)[1].tolist():
        if first < last and last + size - first > most:
            yield slice(first, last)
            first = last
        last += size
        while last - first > most:
            yield slice(first, first + most)
            first += most
    if first < last:
        yield slice(first, last)
