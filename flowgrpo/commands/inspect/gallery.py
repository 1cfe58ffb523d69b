"""`flowgrpo gallery`: a page of samples before and after training at the same seeds, or of several runs compared."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from flowgrpo.commands.compare.page import comparison
from flowgrpo.commands.page_parts.cards import gaps, mean_gain, read_cards
from flowgrpo.commands.page_parts.curve import curve
from flowgrpo.commands.page_parts.folder import input_errors, read_config, read_log, trained_weights
from flowgrpo.commands.page_parts.history import held_out_means, of_phase, part_curves, points, training_cost
from flowgrpo.commands.page_parts.media import LONGEST
from flowgrpo.commands.page_parts.numbers import counts, difference, minutes, number
from flowgrpo.commands.page_parts.pages import check_out, template, write_page
from flowgrpo.commands.page_parts.totals import Totals, watched_names
from flowgrpo.commands.page_parts.trees import TREES, check_trees
from flowgrpo.schema.readable import counted
from flowgrpo.training.run.run_files import read_metrics
from rewards.base import one_line


def write_gallery(folders: Sequence[Path], out: Path) -> Path:
    """Write to `out` the page of one run, or of one folder of samples with a manifest.jsonl, or a comparison of several.

    Raises InputError if a folder has no samples or unreadable files, or the page cannot be written.
    """
    check_out(out, "gallery.html")
    return write_page(out, comparison(folders) if len(folders) > 1 else _page(folders[0], out))


def check_readable(folder: Path) -> None:
    """Refuse a run whose metrics, samples or trees are damaged, so that its pages could not be written."""
    _read(folder)
    check_trees(folder)


def _page(folder: Path, out: Path) -> str:
    trees = folder / TREES
    return template("page.html.jinja").render(
        section=_read(folder),
        trees=quote(os.path.relpath(trees, out.parent)) if trees.is_file() else None,
        longest=LONGEST,
        number=number,
        difference=difference,
        counts=counts,
    )


def _read(folder: Path) -> dict[str, Any]:
    """Return the values that the template shows of a folder."""
    with input_errors(folder):
        config = read_config(folder)
        trained, watched = Totals.of(config), watched_names(config)
        cards = list(read_cards(folder, trained).values())
        samples = [sample for card in cards for sample in card.samples]
        metrics = read_metrics(folder)
        held_out, train = points(metrics, "eval", "reward/mean"), points(metrics, "train", "reward/mean")
        means = held_out_means(metrics)
        return {
            "name": folder.resolve().name,
            "cards": cards,
            "steps": sorted({sample.step for sample in samples}),
            "facts": [*_facts(config, metrics), *_warnings(folder)],
            "headline": means if len(means) > 1 else None,
            "curve": curve(held_out, train) if len(held_out) > 1 or len(train) > 1 else None,
            "parts": part_curves(metrics, trained.names, watched),
            "watched": watched,
            "gaps": gaps(cards, watched),
            "gain": mean_gain(cards),
            "texts": config.get("kind") == "mdlm" or any(sample.answer is not None for sample in samples),
            "sounds": bool(cards) and cards[0].samples[0].outline is not None,
        }


def _warnings(folder: Path) -> list[tuple[str, str]]:
    lines = read_log(folder)
    return [("warnings", f"{len(lines)} in log.txt, the last: {one_line(lines[-1])}")] if lines else []


def _facts(config: dict[str, Any], metrics: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return labelled facts of a run for the head of its page; none for a folder of samples."""
    if not config:
        return []
    model, train, algorithm = config["model"], config["train"], config["algorithm"]
    lines = of_phase(metrics, "train")
    facts = [
        ("model", model["path"]),
        ("method", algorithm["preset"]),
        *([("decoder", f"{algorithm['decoder']['name']}, {model['length']} tokens")] if "decoder" in algorithm else []),
        ("weights", trained_weights(model["lora"])),
        ("batch", f"{train['groups']} prompts × {train['group_size']} samples, {counted(train['updates'], 'update')}"),
        ("rewards", ", ".join(use["name"] or use["use"] for use in config["rewards"])),
        ("iterations", str(len(lines))),
    ]
    if lines:
        facts.append(("training", minutes(training_cost(metrics, "seconds"))))
        facts.append(("model evaluations", f"{training_cost(metrics, 'evaluations'):,}"))
        drifts = [m["policy/max_abs_log_ratio"] for m in lines if m["policy/max_abs_log_ratio"] is not None]
        facts += [("largest drift", f"{max(drifts):.0e}".replace("0e+00", "exactly 0"))] if drifts else []
    return facts
