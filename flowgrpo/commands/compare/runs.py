"""Read the runs and folders of samples that a page compares."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from flowgrpo.commands.compare.differences import in_words
from flowgrpo.commands.page_parts.cards import Card, Key, read_cards
from flowgrpo.commands.page_parts.folder import input_errors, read_config
from flowgrpo.commands.page_parts.history import COSTS, Metrics, held_out_means, of_phase, points, training_cost
from flowgrpo.commands.page_parts.numbers import Mean
from flowgrpo.commands.page_parts.totals import Totals, name_of, watched_names
from flowgrpo.data import tables
from flowgrpo.errors import InputError
from flowgrpo.training.run.run_files import read_metrics

COLOURS = 6  # number of colours; a seventh run has the first colour and a dashed line


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, or a folder of samples without config, metrics and environment."""

    index: int  # place on the page
    name: str  # unique on the page
    config: dict[str, Any]
    settings: dict[str, str]  # the config, flat and in words
    environment: dict[str, str]  # versions, device and git commit, flat and in words
    metrics: Metrics
    trained: Totals
    method: str | None  # the preset
    means: list[Mean]  # see `held_out_means`
    costs: dict[str, float]  # of training, by the keys of `COSTS`; empty without iterations
    watched: list[str]  # rewards that it evaluates but does not train on
    cards: dict[Key, Card]

    @property
    def letter(self) -> str:
        """The run's letter on the page: A, B, ..., Z, A2, ..."""
        again = self.index // len(ascii_uppercase)
        return ascii_uppercase[self.index % len(ascii_uppercase)] + (f"{again + 1}" if again else "")

    @property
    def kind(self) -> str:
        """CSS classes of the run's colour."""
        return f"c{self.index % COLOURS}{' dashed' if self.index >= COLOURS else ''}"

    @property
    def counted(self) -> tuple[Any, ...] | None:
        """What defines the total reward: its form, caution, and rewards with weights; equal for comparable runs.

        The total of a folder of samples is the plain sum of all their rewards; None without any.
        """
        if not self.config:
            names = {name for card in self.cards.values() for one in card.samples for name in one.rewards}
            return ("sum", None, frozenset((name, 1.0, 0.0) for name in names)) if names else None
        how = self.trained
        members = frozenset((member.name, member.weight, member.offset) for member in how.members)
        return how.form, how.caution if how.form == "cautious" else None, members

    def held_out(self, reward: str, axis: str) -> list[tuple[float, float]]:
        """Return (x, mean) of each evaluation of a reward ("": the total); `axis` is `step` or a key of `COSTS`."""
        evaluations = points(self.metrics, "eval", f"reward/{reward}/mean" if reward else "reward/mean")
        return [
            (step if axis == "step" else training_cost(self.metrics, axis, step), value) for step, value in evaluations
        ]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read runs and folders of samples; raise InputError if one holds no samples or cannot be read."""
    named = zip(folders, unique_names(folders), strict=True)
    return [_read(folder, index, name, len(folders)) for index, (folder, name) in enumerate(named)]


def unique_names(folders: Sequence[Path]) -> list[str]:
    """Return the last part of each folder's path, preceded by enough parents to make the names unique."""
    ways = [folder.resolve().parts for folder in folders]
    lengths = [1] * len(ways)
    while True:
        names = ["/".join(way[-length:]) for way, length in zip(ways, lengths, strict=True)]
        count = Counter(names)
        longer = [
            min(length + (count[name] > 1), len(way)) for way, length, name in zip(ways, lengths, names, strict=True)
        ]
        if longer == lengths:
            return names
        lengths = longer


def have_same_totals(runs: Sequence[Run]) -> bool:
    """Return whether the totals of all runs that have one combine rewards of the same names in the same way."""
    return len({run.counted for run in runs} - {None}) <= 1


def find_redefined(runs: Sequence[Run]) -> list[str]:
    """Return the names of rewards whose function, options or `only` differ between runs."""
    uses = [use for run in runs for key in ("rewards", "eval_rewards") for use in run.config.get(key, [])]
    defined = {(name_of(use), repr([use["use"], use.get("options"), use.get("only")])) for use in uses}
    return [name for name, count in Counter(name for name, _ in defined).items() if count > 1]


def _read(folder: Path, index: int, name: str, folders: int) -> Run:
    with input_errors(folder):
        config = read_config(folder)
        trained = Totals.of(config)
        cards = read_cards(folder, trained, folders)
        metrics = read_metrics(folder)
        return Run(
            index=index,
            name=name,
            config=config,
            settings=in_words(_name_rewards(config)),
            environment=in_words(_environment(folder)),
            metrics=metrics,
            trained=trained,
            method=config["algorithm"]["preset"] if config else None,
            means=held_out_means(metrics),
            costs={cost: training_cost(metrics, cost) for cost in COSTS} if of_phase(metrics, "train") else {},
            watched=watched_names(config),
            cards=cards,
        )


def _name_rewards(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with a text for each reward under its name, such as `rewards.redness`, in place of lists."""
    named: dict[str, Any] = {}
    for key, value in config.items():
        if key in ("rewards", "eval_rewards"):
            named |= {f"{key}.{name_of(use)}": _describe_reward(use) for use in value}
        else:
            named[key] = value
    return named


def _describe_reward(use: Mapping[str, Any]) -> str:
    given = {key: value for key, value in use.items() if key != "use" and (value or key == "weight")}
    return ", ".join([use["use"], *(f"{key} {json.dumps(value, default=str)}" for key, value in given.items())])


def _environment(folder: Path) -> dict[str, Any]:
    file = folder / "environment.json"
    environment = tables.document(file) if file.is_file() else {}
    if not isinstance(environment, dict):
        raise InputError(f"{file}: it holds no object, as the environment of a run is")
    return environment
