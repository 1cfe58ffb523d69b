"""The runs and folders of samples that a page compares, each with its letter and its points."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from flowgrpo.commands.compare.differences import in_words
from flowgrpo.commands.gallery.cards import Card, read_cards, read_config, readable
from flowgrpo.commands.gallery.history import COSTS, Metrics, held_out_means, points, spent, trained_lines
from flowgrpo.commands.gallery.numbers import Mean
from flowgrpo.commands.gallery.totals import Totals, name_of
from flowgrpo.data import tables
from flowgrpo.errors import InputError
from flowgrpo.training.run.run_files import read_metrics

COLOURS = 6  # that a page has; a seventh run has the first one's, and a dashed line

Key = tuple[str, int | None, int]  # prompt, seed, and which of several alike


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, or a folder of samples, which has neither config nor metrics nor environment.

    Attributes:
        index: its place among the compared ones.
        name: which no other of them has.
        config: as resolved.
        settings: the same by flat keys, in words.
        environment: versions, device and git commit, as the settings.
        trained: the rewards that count.
        method: its preset; None of a folder.
        means: of the held-out reward, see `held_out_means`.
        costs: what training took, by cost; none where no iteration says it.
        watched: names of the rewards that it does not train on.
        cards: of its samples.
    """

    index: int
    name: str
    config: dict[str, Any]
    settings: dict[str, str]
    environment: dict[str, str]
    metrics: Metrics
    trained: Totals
    method: str | None
    means: list[Mean]
    costs: dict[str, float]
    watched: list[str]
    cards: dict[Key, Card]

    @property
    def letter(self) -> str:
        """A, B, C, ..., Z, A2, ..."""
        again = self.index // len(ascii_uppercase)
        return ascii_uppercase[self.index % len(ascii_uppercase)] + (f"{again + 1}" if again else "")

    @property
    def kind(self) -> str:
        """CSS classes of its colour."""
        return f"c{self.index % COLOURS}{' dashed' if self.index >= COLOURS else ''}"

    @property
    def counted(self) -> tuple[Any, ...]:
        """How its total is made of which rewards; of a folder the sum of all that its samples have."""
        if not self.config:
            names = {name for card in self.cards.values() for one in card.samples for name in one.rewards}
            return "sum", None, frozenset((name, 1.0, 0.0) for name in names)
        how = self.trained
        members = frozenset((member.name, member.weight, member.offset) for member in how.members)
        return how.form, how.caution if how.form == "cautious" else None, members

    def held_out(self, reward: str, axis: str) -> list[tuple[float, float]]:
        """Points of a curve: what training had cost up to each evaluation, or its step, and the mean reward there.

        Args:
            reward: the metric's name without `reward/` and `/mean`; empty for the total.
            axis: `step`, or a cost.
        """
        found = points(self.metrics, "eval", f"reward/{reward}/mean" if reward else "reward/mean")
        return [(step if axis == "step" else spent(self.metrics, axis, step), value) for step, value in found]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs and folders of samples, in their order.

    Raises:
        InputError: one holds no samples, or files that cannot be read.
    """
    return [
        _read(folder, index, name, len(folders))
        for index, (folder, name) in enumerate(zip(folders, names(folders), strict=True))
    ]


def names(folders: Sequence[Path]) -> list[str]:
    """The last part of each folder's path, or as many more as it takes to tell it from the others."""
    ways = [folder.resolve().parts for folder in folders]
    lengths = [1] * len(ways)
    while True:
        found = ["/".join(way[-length:]) for way, length in zip(ways, lengths, strict=True)]
        count = Counter(found)
        longer = [
            min(length + (count[name] > 1), len(way)) for way, length, name in zip(ways, lengths, found, strict=True)
        ]
        if longer == lengths:
            return found
        lengths = longer


def counts_alike(runs: Sequence[Run]) -> bool:
    """Whether the totals of the runs are made of rewards of the same names in the same way."""
    return len({run.counted for run in runs}) == 1


def redefined(runs: Sequence[Run]) -> list[str]:
    """Names of rewards that are not the same function with the same options in all runs that train on them or watch them."""
    uses = [use for run in runs for key in ("rewards", "eval_rewards") for use in run.config.get(key, [])]
    made = {(name_of(use), repr([use["use"], use.get("options"), use.get("only")])) for use in uses}
    return [name for name, count in Counter(name for name, _ in made).items() if count > 1]


def _read(folder: Path, index: int, name: str, folders: int) -> Run:
    with readable(folder):
        config = read_config(folder)
        trained = Totals.of(config)
        cards: dict[Key, Card] = {}
        seen: Counter[tuple[str, int | None]] = Counter()
        for card in read_cards(folder, trained, folders):
            cards[card.prompt, card.seed, seen[card.prompt, card.seed]] = card
            seen[card.prompt, card.seed] += 1
        metrics = read_metrics(folder)
        return Run(
            index=index,
            name=name,
            config=config,
            settings=in_words(config),
            environment=in_words(_environment(folder)),
            metrics=metrics,
            trained=trained,
            method=config["algorithm"]["preset"] if config else None,
            means=held_out_means(metrics),
            costs={cost: spent(metrics, cost) for cost in COSTS} if trained_lines(metrics) else {},
            watched=[name_of(use) for use in config.get("eval_rewards", [])],
            cards=cards,
        )


def _environment(folder: Path) -> dict[str, Any]:
    file = folder / "environment.json"
    environment = tables.document(file) if file.is_file() else {}
    if not isinstance(environment, dict):
        raise InputError(f"{file}: it holds no object, as the environment of a run is")
    return environment
