"""Texts of three letters whose expected reward is a sum: every canvas that a decoder can come to, with its probability.

Nothing here calls the project's decoders or likelihoods, which are held against it. A canvas is a tuple of letters, None
where it is open; logits of a place depend on its neighbours, a prompt of one letter before the first.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

LENGTH, LETTERS = 3, 2
END, MASK = 2, 3  # tokens behind the letters
PROMPT = 0
REWARDS = dict(zip(itertools.product("ab", repeat=LENGTH), (0.3, 1.1, 2.0, -0.4, 0.9, -1.2, 0.1, 1.6), strict=True))
Canvas = tuple[int | None, ...]
# The canvas that follows, its probability, and log p of what is committed.
Transition = tuple[Canvas, torch.Tensor, torch.Tensor]


class Table(torch.nn.Module):
    """Logits by a bias of the place and a table for either neighbour; never the end, and of the mask anything."""

    def __init__(self):
        super().__init__()
        random = torch.Generator().manual_seed(3)
        for name, rows in (("bias", LENGTH + 1), ("left", MASK + 1), ("right", MASK + 1)):
            self.register_parameter(name, torch.nn.Parameter(0.7 * torch.randn(rows, LETTERS, generator=random)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, 4) of tokens (B, T)."""
        letters = self.bias[torch.arange(ids.shape[1]).clamp(max=LENGTH)].expand(len(ids), -1, -1)
        before = torch.nn.functional.pad(self.left[ids[:, :-1]], (0, 0, 1, 0))
        behind = torch.nn.functional.pad(self.right[ids[:, 1:]], (0, 0, 0, 1))
        return torch.nn.functional.pad(letters + before + behind, (0, MASK + 1 - LETTERS), value=-30.0)


@dataclass(frozen=True)
class Decoding:
    """A decoder as the chances of what it does.

    Attributes:
        order: which open places are sure enough: confidence, gumbel, entropy, random or left_to_right.
        counts: how many places take their letter, by step; the last takes all that are left.
        temperatures: that the letters are drawn at, with their chances.
    """

    order: str
    counts: Sequence[int] = (1, 1)
    temperatures: Sequence[tuple[float, float]] = ((1.0, 1.0),)


def normal_temperatures(mean: float, std: float, *, top: float, nodes: int = 6) -> list[tuple[float, float]]:
    """Temperatures top x sigmoid(normal), around one, with their weights in a Gauss-Hermite sum."""
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    middle = math.log(mean / (top - mean))
    found = [top / (1 + math.exp(-(middle + std * point))) for point in points.tolist()]
    return list(zip(found, (weights / weights.sum()).tolist(), strict=True))


class Exact:
    """What a decoder earns by a table, and the gradients of that and of estimates of it, as flat vectors."""

    def __init__(self, table: Table, decoding: Decoding):
        self.table, self.decoding = table, decoding
        self._known: dict[tuple[int, Canvas], list[Transition]] = {}
        self._values: dict[tuple[int, Canvas], torch.Tensor] = {}

    @cached_property
    def _logits(self) -> dict[Canvas, torch.Tensor]:
        """Logits (3, 2) float64 of each canvas, with their graph."""
        canvases = list(itertools.product((0, 1, None), repeat=LENGTH))
        ids = torch.tensor([[PROMPT, *(MASK if token is None else token for token in each)] for each in canvases])
        return dict(zip(canvases, self.table(ids)[:, 1:, :LETTERS].double(), strict=True))

    def transitions(self, step: int, canvas: Canvas) -> list[Transition]:
        """What may follow a canvas, each once: chances are summed over all that leads there."""
        key = step, canvas
        if key not in self._known:
            found: dict[Canvas, Transition] = {}
            for after, chance, log_prob in self._proposals(step, canvas):
                found[after] = after, chance + (found[after][1] if after in found else 0.0), log_prob
            self._known[key] = list(found.values())
        return self._known[key]

    def _proposals(self, step: int, canvas: Canvas) -> Iterator[Transition]:
        """Every letter that each open place may propose, at every temperature, and who is sure enough."""
        places = [i for i, token in enumerate(canvas) if token is None]
        count = self.decoding.counts[step] if step < len(self.decoding.counts) else len(places)
        plain = self._logits[canvas].log_softmax(-1)
        for temperature, share in self.decoding.temperatures:
            tempered = (self._logits[canvas] / temperature).log_softmax(-1)
            for letters in itertools.product(range(LETTERS), repeat=len(places)):
                proposed = dict(zip(places, letters, strict=True))
                chance = share * math.prod(tempered[i, letter].exp() for i, letter in proposed.items())
                for chosen, weight in self._chosen(proposed, plain, tempered, count):
                    after = tuple(proposed[i] if i in chosen else token for i, token in enumerate(canvas))
                    yield after, chance * weight, sum(plain[i, proposed[i]] for i in chosen)

    def _chosen(
        self, proposed: dict[int, int], plain: torch.Tensor, tempered: torch.Tensor, count: int
    ) -> list[tuple[Sequence[int], torch.Tensor | float]]:
        """The places that may take their letter, and with which chance."""
        places, order = list(proposed), self.decoding.order
        if count >= len(places) or count == 0:
            return [(places[:count], 1.0)]
        if order == "left_to_right":
            return [(places[:count], 1.0)]
        if order == "random":
            return [((i,), 1 / len(places)) for i in places]
        sure = torch.stack([plain[i, letter].exp() for i, letter in proposed.items()])
        if order == "gumbel":
            return [((i,), weight) for i, weight in zip(places, sure.softmax(0), strict=True)]
        if order == "entropy":
            sure = torch.stack([(tempered[i].exp() * tempered[i]).sum() for i in places])
        return [((places[int(sure.argmax())],), 1.0)]

    def value(self, step: int, canvas: Canvas) -> torch.Tensor:
        """The expected reward from a canvas on."""
        if None not in canvas:
            return torch.tensor(REWARDS[tuple("ab"[token] for token in canvas)], dtype=torch.float64)
        key = step, canvas
        if key not in self._values:
            following = self.transitions(step, canvas)
            self._values[key] = sum(chance * self.value(step + 1, after) for after, chance, _ in following)
        return self._values[key]

    @cached_property
    def earned(self) -> torch.Tensor:
        return self.value(0, (None,) * LENGTH)

    @property
    def gradient(self) -> torch.Tensor:
        """Of the expected reward."""
        return self._flat(self.earned)

    @property
    def by_trajectory(self) -> torch.Tensor:
        """The mean of the reward's advantage times the gradient of log p of each letter where it was committed."""
        return self._flat(self._scored(0, (None,) * LENGTH, 1.0))

    @property
    def by_one_step(self) -> torch.Tensor:
        """The same with log p of all letters as if none were seen."""
        whole = self._logits[(None,) * LENGTH].log_softmax(-1)
        loss = 0.0
        for text, chance in self.texts().items():
            reward = REWARDS[tuple("ab"[token] for token in text)]
            loss = loss + chance * (reward - self.earned.item()) * sum(whole[i, token] for i, token in enumerate(text))
        return self._flat(loss)

    def texts(self) -> dict[Canvas, float]:
        reached, chances = {(None,) * LENGTH: 1.0}, dict.fromkeys(itertools.product(range(LETTERS), repeat=LENGTH), 0.0)
        for step in range(LENGTH):
            following: dict[Canvas, float] = {}
            for canvas, chance in reached.items():
                for after, weight, _ in self.transitions(step, canvas):
                    following[after] = following.get(after, 0.0) + chance * weight.item()
            reached = following
        return {**chances, **reached}

    def _scored(self, step: int, canvas: Canvas, reached: float) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for after, chance, log_prob in self.transitions(step, canvas):
            weight = reached * chance.item()
            gain = (self.value(step + 1, after) - self.earned).item()
            total = total + weight * gain * log_prob
            if None in after:
                total = total + self._scored(step + 1, after, weight)
        return total

    def _flat(self, of: torch.Tensor) -> torch.Tensor:
        found = torch.autograd.grad(of, list(self.table.parameters()), retain_graph=True, allow_unused=True)
        return torch.cat([each.flatten().double() for each in found])
