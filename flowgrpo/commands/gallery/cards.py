"""The samples of a run or a folder as a page shows them: a card for each prompt and seed, with its samples by step."""

from __future__ import annotations

import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from flowgrpo.commands.gallery.media import data_url, outline
from flowgrpo.commands.gallery.numbers import difference, number, share
from flowgrpo.commands.gallery.text import answer
from flowgrpo.commands.gallery.totals import Totals
from flowgrpo.data.yaml_maps import read_map
from flowgrpo.errors import InputError
from flowgrpo.training.run.run_files import read_manifest
from rewards.files import suffixes
from rewards.files.media import MediaError

LARGEST_MEDIA = 64 << 20  # bytes of a page's video and audio files, above which the steps between are left out
LARGEST_TEXTS = 4 << 20  # the same of texts, which take several times as much of a page as of the folder


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One embedded sample.

    Attributes:
        file: it was read from.
        step: it was made at.
        reward: in total; None where unknown.
        rewards: by name.
        bounds: between which the total lies.
        url: of its data, a picture's (moving or not) or a sound's; None of a text.
        outline: of a sound, as an SVG path; None of anything else.
        answer: of a text, as HTML; None of anything else.
    """

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
        """How far the total is between its bounds, in percent."""
        return share(self.reward, *self.bounds)


@dataclass(frozen=True)
class Card:
    """The samples of one prompt and seed, by step; the seed is None where it is unknown."""

    prompt: str
    seed: int | None
    samples: list[Shown]

    @property
    def gain(self) -> float | None:
        """Reward of the last sample minus that of the first; None if one is unknown or there is only one."""
        first, last = self.samples[0].reward, self.samples[-1].reward
        return None if len(self.samples) < 2 or first is None or last is None else last - first

    def gain_in(self, name: str) -> float | None:
        """Gain in one reward; None if it is unknown."""
        first, last = self.samples[0].rewards.get(name), self.samples[-1].rewards.get(name)
        return None if len(self.samples) < 2 or first is None or last is None else last - first

    def gained(self, sample: Shown, name: str | None = None) -> str:
        """How a sample's total, or one reward, differs from the first sample's."""
        if name is None:
            return difference(self.samples[0].reward, sample.reward)
        return difference(self.samples[0].rewards.get(name), sample.rewards.get(name))

    @property
    def frames(self) -> list[dict[str, Any]]:
        """What the page needs to show each sample when scrubbing through the steps."""
        return [
            {
                "step": sample.step,
                "reward": sample.reward,
                "total": [number(sample.reward), self.gained(sample)],
                "parts": {
                    name: [number(sample.rewards.get(name)), self.gained(sample, name)]
                    for name in self.samples[-1].rewards
                },
                "bar": sample.bar,
                **({"url": sample.url, "outline": sample.outline} if sample.answer is None else {}),
            }
            for sample in self.samples
        ]


def gaps(cards: Sequence[Card], watched: Sequence[str]) -> list[float]:
    """How far each card's gain in the trained reward is above its gain in the watched ones.

    Gains are in units of their standard deviation over the cards, for rewards have different scales; of several watched
    rewards the largest gap counts. 0 where a gain is unknown or nothing is watched.
    """
    trained = _standardised([card.gain for card in cards])
    gaps = [0.0] * len(cards)
    for name in watched:
        for i, (trained_gain, watched_gain) in enumerate(
            zip(trained, _standardised([card.gain_in(name) for card in cards]), strict=True)
        ):
            if trained_gain is not None and watched_gain is not None:
                gaps[i] = max(gaps[i], trained_gain - watched_gain)
    return gaps


def _standardised(gains: Sequence[float | None]) -> list[float | None]:
    known = [gain for gain in gains if gain is not None]
    spread = statistics.pstdev(known) if known else 0.0
    return [None if gain is None else gain / (spread or 1.0) for gain in gains]


def read_config(folder: Path) -> dict[str, Any]:
    """The config of a run as resolved; empty for a folder of samples.

    Raises:
        InputError: it cannot be read, or is not a map.
    """
    return read_map(folder / "config.yaml") if (folder / "config.yaml").is_file() else {}


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Say in one sentence what is wrong with a folder, which may be anyone's, where reading it fails.

    Raises:
        InputError: a file of samples cannot be read, or the config or the metrics are not those of a run.
    """
    try:
        yield
    except MediaError as error:
        raise InputError(f"{folder}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder}: its config.yaml or metrics.jsonl is not of a run ({error!r})") from error


def read_cards(folder: Path, trained: Totals, folders: int = 1) -> list[Card]:
    """The cards of a run, or of a folder of samples with a manifest.jsonl; none of a run that keeps no samples.

    Args:
        trained: the rewards that count.
        folders: how many share the page, of which each may fill its part.

    Raises:
        InputError: the manifest is broken, a file is missing, or a folder that is not of a run has no samples.
    """
    is_run = any((folder / name).is_file() for name in ("config.yaml", "metrics.jsonl"))
    samples = folder / "samples" if is_run else folder
    lines = [{"seed": None, "step": 0, "rewards": {}, **line} for line in read_manifest(samples)]
    for line in lines:
        if not os.path.isfile(samples / line["file"]):
            raise InputError(f"{samples / 'manifest.jsonl'}: there is no file {samples / line['file']}")
    manifest = _worth_showing(samples, lines, folders)
    if not manifest and not is_run:  # a run that keeps no pictures still has its curve
        raise InputError(f"{folder}: there are no samples to show, it has no manifest.jsonl with lines")
    totals = [total for line in lines if (total := trained.total(line["rewards"])) is not None]
    seen_bounds = min(totals, default=0.0), max(totals, default=0.0)
    by_prompt: defaultdict[tuple[str, int | None, int], list[dict[str, Any]]] = defaultdict(list)
    seen: Counter[tuple[str, int | None, int]] = Counter()
    for line in manifest:
        key = line["prompt"], line["seed"], line["step"]
        by_prompt[line["prompt"], line["seed"], seen[key]].append(line)  # alike in all three: another card
        seen[key] += 1
    return [
        Card(
            prompt,
            seed,
            [_shown(samples, line, trained, seen_bounds) for line in sorted(lines, key=lambda line: line["step"])],
        )
        for (prompt, seed, _), lines in by_prompt.items()
    ]


def _worth_showing(samples: Path, manifest: list[dict[str, Any]], folders: int) -> list[dict[str, Any]]:
    """The lines to show: all, or those of the first and the last step where all would make the page too large to open."""
    files = [samples / line["file"] for line in manifest]

    def size(*kinds: str) -> int:
        return sum(file.stat().st_size for file in files if suffixes.suffix_of(file) in kinds)

    media = (*suffixes.FILMS, *suffixes.ANIMATIONS, ".webp", *suffixes.SOUNDS)
    if size(*media) <= LARGEST_MEDIA / folders and size(*suffixes.TEXTS) <= LARGEST_TEXTS / folders:
        return manifest
    steps = [line["step"] for line in manifest]
    return [line for line in manifest if line["step"] in (min(steps), max(steps))]


def _shown(samples: Path, line: Mapping[str, Any], trained: Totals, seen_bounds: tuple[float, float]) -> Shown:
    rewards = line["rewards"]
    file = samples / line["file"]
    text = suffixes.suffix_of(file) in suffixes.TEXTS
    return Shown(
        file=file,
        step=line["step"],
        reward=trained.total(rewards),
        rewards=rewards,
        bounds=trained.total_bounds(rewards) or seen_bounds,
        url=None if text else data_url(file),
        outline=None if text else outline(file),
        answer=answer(file) if text else None,
    )
