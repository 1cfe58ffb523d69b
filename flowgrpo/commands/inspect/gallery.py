"""The gallery: one self-contained page of before and after at the same seeds, with rewards and the reward curve.

Of several runs the page is the comparison of `commands.compare`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from flowgrpo.commands.compare.page import comparison
from flowgrpo.commands.gallery.cards import Card, gaps, read_cards, read_config, readable
from flowgrpo.commands.gallery.curve import PART, curve
from flowgrpo.commands.gallery.history import held_out_means, points, spent, trained_lines
from flowgrpo.commands.gallery.media import LONGEST
from flowgrpo.commands.gallery.numbers import Mean, counts, difference, minutes, number
from flowgrpo.commands.gallery.pages import template
from flowgrpo.commands.gallery.totals import Totals, name_of
from flowgrpo.commands.gallery.trees import TREES, check_trees
from flowgrpo.commands.gallery.words import trained_weights
from flowgrpo.errors import InputError
from flowgrpo.training.run.run_files import read_metrics
from flowgrpo.training.run.run_folder import check_writable, replace_text
from rewards.base import one_line


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
    """Write the page of a run or a folder of samples (with a manifest.jsonl), or of several compared, to `out`, all at once.

    Raises:
        InputError: a folder holds no samples, or files that cannot be read; or the page cannot be written.
    """
    if out.exists() and not out.is_file():  # a folder, or a device, which would be replaced
        raise InputError(f"--out: {out} is there and no ordinary file; name one, such as gallery.html")
    check_writable(out.parent, str(out))
    page = comparison(folders) if len(folders) > 1 else _page(folders[0], out)
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(out, page)
    return out


def _page(folder: Path, out: Path) -> str:
    """The page of one folder that is to be written to `out`."""
    section = replace(_read(folder), trees=_way_to_trees(folder, out))
    page = template("page.html.jinja")
    return page.render(section=section, longest=LONGEST, number=number, difference=difference, counts=counts)


def check_readable(folder: Path) -> None:
    """Refuse a folder that a page cannot be written of: its metrics, its manifest, their files, the trees that it kept.

    Raises:
        InputError: something there is damaged.
    """
    _read(folder)
    check_trees(folder)


def _read(folder: Path) -> Section:
    """The section of a folder, which may be anyone's."""
    with readable(folder):
        return _section(folder)


def _section(folder: Path) -> Section:
    config = read_config(folder)
    trained = Totals.of(config)
    cards = read_cards(folder, trained)
    samples = [sample for card in cards for sample in card.samples]
    metrics = read_metrics(folder)
    held_out, train = points(metrics, "eval", "reward/mean"), points(metrics, "train", "reward/mean")
    means = held_out_means(metrics)
    watched = [name_of(use) for use in config.get("eval_rewards", [])]
    return Section(
        name=folder.resolve().name,
        cards=cards,
        steps=sorted({sample.step for sample in samples}),
        facts=[*_facts(config, metrics), *_warnings(folder)],
        headline=(means[0], means[1]) if len(means) > 1 else None,
        curve=curve(held_out, train) if len(held_out) > 1 or len(train) > 1 else None,
        parts=_parts(metrics, trained.names, watched),
        watched=watched,
        gaps=gaps(cards, watched),
        texts=config.get("kind") == "mdlm" or any(sample.answer is not None for sample in samples),
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


def _parts(metrics: list[dict[str, Any]], trained: list[str], watched: list[str]) -> list[tuple[str, bool, str]]:
    """Name, whether it is watched only, and curve of each reward that was evaluated twice; none of a single reward."""
    names = [*trained, *watched]
    charts = []
    for name in names if len(names) > 1 else []:
        held_out, train = (points(metrics, phase, f"reward/{name}/mean") for phase in ("eval", "train"))
        if len(held_out) > 1:
            charts.append((name, name in watched, curve(held_out, train, PART)))
    return charts


def _facts(config: dict[str, Any], metrics: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Short facts of a run for the head of its section."""
    if not config:
        return []
    model, train, algorithm = config["model"], config["train"], config["algorithm"]
    lines = trained_lines(metrics)
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
        facts.append(("training", minutes(spent(metrics, "seconds"))))
        facts.append(("model evaluations", f"{spent(metrics, 'evaluations'):,}"))
        drifts = [m["policy/max_abs_log_ratio"] for m in lines if m["policy/max_abs_log_ratio"] is not None]
        facts += [("largest drift", f"{max(drifts):.0e}".replace("0e+00", "exactly 0"))] if drifts else []
    return facts
