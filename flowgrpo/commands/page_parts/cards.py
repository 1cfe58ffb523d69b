"""Samples as pages show them: a card for each prompt and seed, with its samples by step."""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from flowgrpo.commands.page_parts.media import data_url, outline
from flowgrpo.commands.page_parts.numbers import difference, number, share
from flowgrpo.commands.page_parts.text import answer
from flowgrpo.commands.page_parts.totals import Totals
from flowgrpo.data import run_folders
from flowgrpo.errors import InputError
from flowgrpo.training.run.run_files import read_manifest
from rewards.files import suffixes

LARGEST_MEDIA = 64 << 20  # bytes of video and audio files; a page of more shows the first and the last step only
LARGEST_TEXTS = 4 << 20  # the same for texts, which take several times their file size on a page

Key = tuple[str, int | None, int]  # prompt, seed, and a count that tells equal ones apart


@dataclass(frozen=True, kw_only=True)
class Shown:
    """An embedded sample: its total with bounds, and a data URL, the SVG path of a sound, or the HTML of a text."""

    file: Path
    step: int
    reward: float | None
    rewards: dict[str, float | None]
    bounds: tuple[float, float]
    url: str | None
    outline: str | None
    answer: Markup | None

    @property
    def bar(self) -> int | None:
        """Where the total lies between its bounds, in percent."""
        return share(self.reward, *self.bounds)


@dataclass(frozen=True)
class Card:
    """Samples of one prompt and seed, by step; the seed may be unknown."""

    prompt: str
    seed: int | None
    samples: list[Shown]

    @property
    def gain(self) -> float | None:
        """Total of the last sample minus that of the first; None if one is unknown or there is only one sample."""
        return self._gain([sample.reward for sample in self.samples])

    def gain_in(self, name: str) -> float | None:
        """Return the gain in one reward."""
        return self._gain([sample.rewards.get(name) for sample in self.samples])

    @staticmethod
    def _gain(rewards: Sequence[float | None]) -> float | None:
        first, last = rewards[0], rewards[-1]
        return None if len(rewards) < 2 or first is None or last is None else last - first

    def format_gain(self, sample: Shown, name: str | None = None) -> str:
        """Format how far a sample's total, or its reward `name`, is above the first sample's."""
        if name is None:
            return difference(self.samples[0].reward, sample.reward)
        return difference(self.samples[0].rewards.get(name), sample.rewards.get(name))

    @property
    def frames(self) -> list[dict[str, Any]]:
        """Data of each sample for the page's slider over the steps."""
        return [
            {
                "step": sample.step,
                "reward": sample.reward,
                "total": [number(sample.reward), self.format_gain(sample)],
                "parts": {
                    name: [number(sample.rewards.get(name)), self.format_gain(sample, name)]
                    for name in self.samples[-1].rewards
                },
                "bar": sample.bar,
                **({"url": sample.url, "outline": sample.outline} if sample.answer is None else {}),
            }
            for sample in self.samples
        ]


def gaps(cards: Sequence[Card], watched: Sequence[str]) -> list[float]:
    """Return how far each card's gain in the trained total is above its gain in the watched rewards.

    Gains are divided by their standard deviation over the cards. With several watched rewards, the largest gap counts. A
    gap is at least 0, and 0 if a gain is unknown or nothing is watched.
    """
    trained = _standardise([card.gain for card in cards])
    gaps = [0.0] * len(cards)
    for name in watched:
        for i, (trained_gain, watched_gain) in enumerate(
            zip(trained, _standardise([card.gain_in(name) for card in cards]), strict=True)
        ):
            if trained_gain is not None and watched_gain is not None:
                gaps[i] = max(gaps[i], trained_gain - watched_gain)
    return gaps


def mean_gain(cards: Sequence[Card]) -> tuple[float, float] | None:
    """Return the mean gain of the cards in the trained total with its paired standard error; None of fewer than two."""
    known = [card.gain for card in cards if card.gain is not None]
    return (statistics.mean(known), statistics.stdev(known) / math.sqrt(len(known))) if len(known) > 1 else None


def _standardise(gains: Sequence[float | None]) -> list[float | None]:
    known = [gain for gain in gains if gain is not None]
    spread = statistics.pstdev(known) if known else 0.0
    return [None if gain is None else gain / (spread or 1.0) for gain in gains]


def read_cards(folder: Path, trained: Totals, folders: int = 1) -> dict[Key, Card]:
    """Return the cards of a run, which may have none, or of a folder of samples.

    `folders` is the number of folders on the page, which share its size limits.
    Raises InputError if the manifest is broken, a file is missing, or a folder that is not a run's has no samples.
    """
    is_run = any((folder / name).is_file() for name in ("config.yaml", "metrics.jsonl"))
    samples = folder / "samples" if is_run else folder
    lines = read_lines(samples)
    for line in lines:
        if not os.path.isfile(samples / line["file"]):
            raise InputError(f"{samples / 'manifest.jsonl'}: there is no file {samples / line['file']}")
    shown = _select_lines(samples, lines, folders)
    if not shown and not is_run:  # a run without samples still has its curve
        raise InputError(
            f"{folder}: there are no samples to show, it has no manifest.jsonl with lines{run_folders.hint(folder)}"
        )
    totals = [total for line in lines if (total := trained.total(line["rewards"])) is not None]
    bounds = min(totals, default=0.0), max(totals, default=0.0)
    by_key: defaultdict[Key, list[dict[str, Any]]] = defaultdict(list)
    counts: Counter[Key] = Counter()
    for line in shown:
        same = line["prompt"], line["seed"], line["step"]
        by_key[line["prompt"], line["seed"], counts[same]].append(line)  # a second sample of a step is on another card
        counts[same] += 1
    return {
        (prompt, seed, count): Card(
            prompt,
            seed,
            [show(samples, line, trained, bounds) for line in sorted(lines, key=lambda line: line["step"])],
        )
        for (prompt, seed, count), lines in by_key.items()
    }


def read_lines(samples: Path) -> list[dict[str, Any]]:
    """Return the lines of a manifest, with defaults for a missing seed, step and rewards."""
    return [{"seed": None, "step": 0, "rewards": {}, **line} for line in read_manifest(samples)]


def _select_lines(samples: Path, lines: list[dict[str, Any]], folders: int) -> list[dict[str, Any]]:
    """Return all lines, or those of the first and the last step if a page of all would be too large."""
    files = [samples / line["file"] for line in lines]

    def size(*kinds: str) -> int:
        return sum(file.stat().st_size for file in files if suffixes.suffix_of(file) in kinds)

    media = (*suffixes.FILMS, *suffixes.ANIMATIONS, ".webp", *suffixes.SOUNDS)
    if size(*media) <= LARGEST_MEDIA / folders and size(*suffixes.TEXTS) <= LARGEST_TEXTS / folders:
        return lines
    steps = [line["step"] for line in lines]
    return [line for line in lines if line["step"] in (min(steps), max(steps))]


def show(samples: Path, line: Mapping[str, Any], trained: Totals, bounds: tuple[float, float]) -> Shown:
    """Embed the sample of a manifest's line; `bounds` are used if its total has no bounds."""
    rewards, file = line["rewards"], samples / line["file"]
    text = suffixes.suffix_of(file) in suffixes.TEXTS
    return Shown(
        file=file,
        step=line["step"],
        reward=trained.total(rewards),
        rewards=rewards,
        bounds=trained.total_bounds(rewards) or bounds,
        url=None if text else data_url(file),
        outline=None if text else outline(file),
        answer=answer(file) if text else None,
    )
