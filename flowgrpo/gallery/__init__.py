"""The gallery: one self-contained page of before and after at the same seeds, with rewards and the reward curve."""

from __future__ import annotations

import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from flowgrpo.config import read_map
from flowgrpo.errors import InputError
from flowgrpo.evaluate import read_manifest
from flowgrpo.folders import check_writable
from flowgrpo.gallery.curve import PART, curve
from flowgrpo.gallery.media import LONGEST, data_url, outline
from flowgrpo.gallery.text import answer
from flowgrpo.report import read_metrics
from rewards.media import MediaError

LARGEST_MEDIA = 64 << 20  # bytes of a folder's video and audio files, above which the steps between are left out
LARGEST_TEXTS = 4 << 20  # the same of texts, which take several times as much of a page as of the folder


@dataclass(frozen=True)
class Shown:
    """One embedded sample.

    Attributes:
        step: it was made at.
        reward: in total; None where unknown.
        rewards: by name.
        url: of its data, a picture's (moving or not) or a sound's; None of a text.
        outline: of a sound, as an SVG path; None of anything else.
        answer: of a text, as HTML; None of anything else.
    """

    step: int
    reward: float | None
    rewards: dict[str, float | None]
    url: str | None
    outline: str | None
    answer: Markup | None

    @property
    def frame(self) -> dict[str, Any]:
        """What the page needs to show this sample when scrubbing through the steps."""
        data = {"url": self.url, "outline": self.outline} if self.answer is None else {}
        return {"step": self.step, "reward": self.reward, "rewards": self.rewards, **data}


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


def gaps(cards: Sequence[Card], watched: Sequence[str]) -> list[float]:
    """How far each card's gain in the trained reward is above its gain in the watched ones.

    Gains are in units of their standard deviation over the cards, for rewards have different scales; of several watched
    rewards the largest gap counts. 0 where a gain is unknown or nothing is watched.
    """
    trained = _standardised([card.gain for card in cards])
    gaps = [0.0] * len(cards)
    for name in watched:
        for i, (own, other) in enumerate(
            zip(trained, _standardised([card.gain_in(name) for card in cards]), strict=True)
        ):
            if own is not None and other is not None:
                gaps[i] = max(gaps[i], own - other)
    return gaps


def _standardised(gains: Sequence[float | None]) -> list[float | None]:
    known = [gain for gain in gains if gain is not None]
    spread = statistics.pstdev(known) if known else 0.0
    return [None if gain is None else gain / (spread or 1.0) for gain in gains]


@dataclass(frozen=True)
class Section:
    """One run or folder of samples."""

    name: str
    cards: list[Card]
    steps: list[int]
    facts: list[tuple[str, str]]
    headline: tuple[float, float] | None
    curve: str | None
    parts: list[tuple[str, bool, str]]  # of each of several rewards: name, whether it is only watched, curve
    watched: list[str]  # rewards that nobody trains on
    gaps: list[float]  # of the cards
    texts: bool  # whether its samples are texts

    @property
    def sounds(self) -> bool:
        """Whether its samples are sounds."""
        return bool(self.cards) and self.cards[0].samples[0].outline is not None


def write_gallery(folders: Sequence[Path], out: Path) -> Path:
    """Write the page of runs and folders of samples (with a manifest.jsonl) to `out`.

    Raises:
        InputError: a folder holds no samples, or files that cannot be read; or the page cannot be written.
    """
    check_writable(out.parent, str(out))
    sections = [_read(Path(folder)) for folder in folders]
    templates = Environment(loader=PackageLoader("flowgrpo.gallery", "."), autoescape=True, trim_blocks=True)
    page = templates.get_template("page.html.jinja")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page.render(sections=sections, longest=LONGEST), encoding="utf-8")
    return out


def _read(folder: Path) -> Section:
    """The section of a folder, which may be anyone's."""
    try:
        return _section(folder)
    except MediaError as error:
        raise InputError(f"{folder}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder}: its config.yaml or metrics.jsonl is not of a run ({error!r})") from error


def _section(folder: Path) -> Section:
    samples = folder / "samples" if (folder / "config.yaml").is_file() else folder
    lines = [{"seed": None, "step": 0, "rewards": {}, **line} for line in read_manifest(samples)]
    for line in lines:
        if not os.path.isfile(samples / line["file"]):
            raise InputError(f"{samples / 'manifest.jsonl'}: there is no file {samples / line['file']}")
    manifest = _worth_showing(samples, lines)
    if not manifest and samples == folder:  # a run that keeps no pictures still has its curve
        raise InputError(f"{folder}: there are no samples to show, it has no manifest.jsonl with lines")
    config = read_map(folder / "config.yaml") if samples != folder else {}
    weights = {_name(use): use["weight"] for use in config.get("rewards", [])}
    by_prompt, seen = defaultdict(list), Counter()
    for line in manifest:
        place = line["prompt"], line["seed"], line["step"]
        by_prompt[line["prompt"], line["seed"], seen[place]].append(line)  # alike in all three: another card
        seen[place] += 1
    cards = [
        Card(prompt, seed, [_shown(samples, line, weights) for line in sorted(lines, key=lambda line: line["step"])])
        for (prompt, seed, _), lines in by_prompt.items()
    ]
    metrics = read_metrics(folder)
    held_out, train = _points(metrics, "eval", "reward/mean"), _points(metrics, "train", "reward/mean")
    watched = [_name(use) for use in config.get("eval_rewards", [])]
    return Section(
        folder.resolve().name,
        cards,
        sorted({line["step"] for line in manifest}),
        _facts(config, metrics),
        (held_out[0][1], held_out[-1][1]) if len(held_out) > 1 else None,
        curve(held_out, train) if len(held_out) > 1 or len(train) > 1 else None,
        _parts(metrics, list(weights), watched),
        watched,
        gaps(cards, watched),
        config.get("kind") == "mdlm" or any(line["file"].endswith(".json") for line in manifest),
    )


def _name(use: dict[str, Any]) -> str:
    """How metrics call a reward of a config."""
    return use["name"] or use["use"].rpartition(":")[2]


def _points(metrics: list[dict[str, Any]], phase: str, key: str) -> list[tuple[int, float]]:
    return [(m["step"], m[key]) for m in metrics if m["phase"] == phase and m.get(key) is not None]


def _parts(metrics: list[dict[str, Any]], trained: list[str], watched: list[str]) -> list[tuple[str, bool, str]]:
    """A curve for each reward where there are several."""
    names = [*trained, *watched]
    found = []
    for name in names if len(names) > 1 else []:
        held_out, train = (_points(metrics, phase, f"reward/{name}/mean") for phase in ("eval", "train"))
        if len(held_out) > 1:
            found.append((name, name in watched, curve(held_out, train, PART)))
    return found


def _worth_showing(samples: Path, manifest: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All lines; only those of the first and the last step where the others would make the page too large to open."""
    files = [samples / line["file"] for line in manifest]

    def size(*suffixes: str) -> int:
        return sum(file.stat().st_size for file in files if file.suffix in suffixes)

    if size(".webp", ".wav") <= LARGEST_MEDIA and size(".json") <= LARGEST_TEXTS:
        return manifest
    steps = [line["step"] for line in manifest]
    return [line for line in manifest if line["step"] in (min(steps), max(steps))]


def _shown(samples: Path, line: dict[str, Any], weights: dict[str, float]) -> Shown:
    rewards = line["rewards"]
    known = [
        weights.get(name, 1.0) * value
        for name, value in rewards.items()
        if value is not None and (not weights or name in weights)
    ]
    file = samples / line["file"]
    data = (None, None, answer(file)) if file.suffix == ".json" else (data_url(file), outline(file), None)
    return Shown(line["step"], sum(known) if known else None, rewards, *data)


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
        ("weights", "full" if model["lora"] is None else f"LoRA rank {model['lora']['rank']}"),
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
