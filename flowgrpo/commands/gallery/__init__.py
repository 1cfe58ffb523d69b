"""The gallery: one self-contained page of before and after at the same seeds, with rewards and the reward curve."""

from __future__ import annotations

import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from flowgrpo.commands.gallery.curve import PART, curve
from flowgrpo.commands.gallery.media import LONGEST, data_url, outline
from flowgrpo.commands.gallery.numbers import Mean, difference, number, share
from flowgrpo.commands.gallery.pages import template
from flowgrpo.commands.gallery.text import answer
from flowgrpo.commands.gallery.totals import Totals, name_of
from flowgrpo.commands.gallery.trees import TREES, check_trees
from flowgrpo.commands.gallery.words import trained_weights
from flowgrpo.data.yaml_maps import read_map
from flowgrpo.errors import InputError
from flowgrpo.training.folders import check_writable, replace_text
from flowgrpo.training.manifest import read_manifest
from flowgrpo.training.metric_lines import read_metrics
from rewards.base import one_line
from rewards.media import MediaError

LARGEST_MEDIA = 64 << 20  # bytes of a folder's video and audio files, above which the steps between are left out
LARGEST_TEXTS = 4 << 20  # the same of texts, which take several times as much of a page as of the folder


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One embedded sample.

    Attributes:
        step: it was made at.
        reward: in total; None where unknown.
        rewards: by name.
        bounds: between which the total lies.
        url: of its data, a picture's (moving or not) or a sound's; None of a text.
        outline: of a sound, as an SVG path; None of anything else.
        answer: of a text, as HTML; None of anything else.
    """

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


@dataclass(frozen=True, kw_only=True)
class Section:
    """One run or folder of samples."""

    name: str
    cards: list[Card]
    steps: list[int]
    facts: list[tuple[str, str]]
    headline: tuple[Mean, Mean] | None  # of the held-out reward, before and after
    curve: str | None
    parts: list[tuple[str, bool, str]]  # of each of several rewards: name, whether it is only watched, curve
    watched: list[str]  # rewards that nobody trains on
    gaps: list[float]  # of the cards
    texts: bool  # whether its samples are texts
    trees: str | None  # the way to the page of its trees, if there is one

    @property
    def sounds(self) -> bool:
        """Whether its samples are sounds."""
        return bool(self.cards) and self.cards[0].samples[0].outline is not None


def write_gallery(folders: Sequence[Path], out: Path) -> Path:
    """Write the page of runs and folders of samples (with a manifest.jsonl) to `out`, all at once.

    Raises:
        InputError: a folder holds no samples, or files that cannot be read; or the page cannot be written.
    """
    if out.exists() and not out.is_file():  # a folder, or a device, which would be replaced
        raise InputError(f"--out: {out} is there and no ordinary file; name one, such as gallery.html")
    check_writable(out.parent, str(out))
    sections = [replace(_read(Path(folder)), trees=_way_to_trees(Path(folder), out)) for folder in folders]
    out.parent.mkdir(parents=True, exist_ok=True)
    page = template("page.html.jinja")
    replace_text(out, page.render(sections=sections, longest=LONGEST, number=number, difference=difference))
    return out


def check_readable(folder: Path) -> None:
    """Refuse a folder that a page cannot be written of: its metrics, its manifest, their files, the trees that it kept.

    Raises:
        InputError: something there is damaged.
    """
    _read(folder)
    check_trees(folder)


def _read(folder: Path) -> Section:
    """The section of a folder, which may be anyone's."""
    try:
        return _section(folder)
    except MediaError as error:
        raise InputError(f"{folder}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder}: its config.yaml or metrics.jsonl is not of a run ({error!r})") from error


def _section(folder: Path) -> Section:
    is_run = any((folder / name).is_file() for name in ("config.yaml", "metrics.jsonl"))
    samples = folder / "samples" if is_run else folder
    lines = [{"seed": None, "step": 0, "rewards": {}, **line} for line in read_manifest(samples)]
    for line in lines:
        if not os.path.isfile(samples / line["file"]):
            raise InputError(f"{samples / 'manifest.jsonl'}: there is no file {samples / line['file']}")
    manifest = _worth_showing(samples, lines)
    if not manifest and not is_run:  # a run that keeps no pictures still has its curve
        raise InputError(f"{folder}: there are no samples to show, it has no manifest.jsonl with lines")
    config = read_map(folder / "config.yaml") if (folder / "config.yaml").is_file() else {}
    trained = Totals.of(config)
    totals = [total for line in lines if (total := trained.total(line["rewards"])) is not None]
    seen_bounds = min(totals, default=0.0), max(totals, default=0.0)
    by_prompt, seen = defaultdict(list), Counter()
    for line in manifest:
        key = line["prompt"], line["seed"], line["step"]
        by_prompt[line["prompt"], line["seed"], seen[key]].append(line)  # alike in all three: another card
        seen[key] += 1
    cards = [
        Card(
            prompt,
            seed,
            [_shown(samples, line, trained, seen_bounds) for line in sorted(lines, key=lambda line: line["step"])],
        )
        for (prompt, seed, _), lines in by_prompt.items()
    ]
    metrics = read_metrics(folder)
    held_out, train = _points(metrics, "eval", "reward/mean"), _points(metrics, "train", "reward/mean")
    means = [Mean.of(m) for m in metrics if m["phase"] == "eval" and m["reward/mean"] is not None]
    watched = [name_of(use) for use in config.get("eval_rewards", [])]
    return Section(
        name=folder.resolve().name,
        cards=cards,
        steps=sorted({line["step"] for line in manifest}),
        facts=[*_facts(config, metrics), *_warnings(folder)],
        headline=(means[0], means[-1]) if len(means) > 1 else None,
        curve=curve(held_out, train) if len(held_out) > 1 or len(train) > 1 else None,
        parts=_parts(metrics, trained.names, watched),
        watched=watched,
        gaps=gaps(cards, watched),
        texts=config.get("kind") == "mdlm" or any(line["file"].endswith(".json") for line in manifest),
        trees=None,
    )


def _way_to_trees(folder: Path, page: Path) -> str | None:
    """The address of a run's page of trees, as one that stands in a page; None where there is none."""
    trees = folder / TREES
    return quote(os.path.relpath(trees, page.parent)) if trees.is_file() else None


def _warnings(folder: Path) -> list[tuple[str, str]]:
    """How many warnings a run's log has, and the last of them; nothing without any."""
    log = folder / "log.txt"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return [("warnings", f"{len(lines)} in log.txt, the last: {one_line(lines[-1])}")] if lines else []


def _points(metrics: list[dict[str, Any]], phase: str, key: str) -> list[tuple[int, float]]:
    return [(m["step"], m[key]) for m in metrics if m["phase"] == phase and m.get(key) is not None]


def _parts(metrics: list[dict[str, Any]], trained: list[str], watched: list[str]) -> list[tuple[str, bool, str]]:
    """Name, whether it is watched only, and curve of each reward that was evaluated twice; none of a single reward."""
    names = [*trained, *watched]
    charts = []
    for name in names if len(names) > 1 else []:
        held_out, train = (_points(metrics, phase, f"reward/{name}/mean") for phase in ("eval", "train"))
        if len(held_out) > 1:
            charts.append((name, name in watched, curve(held_out, train, PART)))
    return charts


def _worth_showing(samples: Path, manifest: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines to show: all, or those of the first and the last step where all would make the page too large to open."""
    files = [samples / line["file"] for line in manifest]

    def size(*suffixes: str) -> int:
        return sum(file.stat().st_size for file in files if file.suffix in suffixes)

    if size(".mp4", ".webp", ".wav") <= LARGEST_MEDIA and size(".json") <= LARGEST_TEXTS:
        return manifest
    steps = [line["step"] for line in manifest]
    return [line for line in manifest if line["step"] in (min(steps), max(steps))]


def _shown(samples: Path, line: dict[str, Any], trained: Totals, seen_bounds: tuple[float, float]) -> Shown:
    rewards = line["rewards"]
    file = samples / line["file"]
    text = file.suffix == ".json"
    return Shown(
        step=line["step"],
        reward=trained.total(rewards),
        rewards=rewards,
        bounds=trained.total_bounds(rewards) or seen_bounds,
        url=None if text else data_url(file),
        outline=None if text else outline(file),
        answer=answer(file) if text else None,
    )


def _facts(config: dict[str, Any], metrics: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Short facts of a run for the head of its section."""
    if not config:
        return []
    model, train, algorithm = config["model"], config["train"], config["algorithm"]
    lines = [m for m in metrics if m["phase"] == "train"]
    facts = [
        ("model", model["path"]),
        ("method", algorithm["preset"]),
        *([("decoder", f"{algorithm['decoder']['name']}, {model['length']} tokens")] if "decoder" in algorithm else []),
        ("weights", trained_weights(model["lora"])),
        (
            "batch",
            f"{train['groups']} prompts × {train['group_size']} samples, {train['updates']} updates",
        ),
        ("rewards", ", ".join(use["name"] or use["use"] for use in config["rewards"])),
        ("iterations", str(len(lines))),
    ]
    if lines:
        seconds = sum(m["time/rollout"] + m["time/update"] for m in lines)
        facts.append(("training", f"{int(seconds) // 60} min {int(seconds) % 60} s"))
        facts.append(("model evaluations", f"{sum(m['cost/model_evaluations'] for m in lines):,}"))
        drifts = [m["policy/max_abs_log_ratio"] for m in lines if m["policy/max_abs_log_ratio"] is not None]
        facts += [("largest drift", f"{max(drifts):.0e}".replace("0e+00", "exactly 0"))] if drifts else []
    return facts
