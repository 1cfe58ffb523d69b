"""Tables of docs/reference/presets.md, docs/reference/texts.md and docs/research/texts.md: what `flowgrpo methods` shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowgrpo.commands.methods.catalogue import Entry, Wing, presets, words

AVERAGE = {"decay": "{}", "every": "every {}", "warmup": "warm-up {}"}


def tables(wing: Wing) -> list[str]:
    """Return the tables of a wing's page, in Markdown: its axes, what an iteration costs, and the sources' loops."""
    return [axes(wing), costs(wing), loops(wing)]


def axes(wing: Wing) -> str:
    """Return the table of axes, with the words of each and links to the files of their formulas."""
    rows = []
    for axis, question in wing.questions.items():
        entries = [entry for entry in words(wing) if entry.axis == axis]
        files = dict.fromkeys(entry.where.partition(":")[0] for entry in entries)
        links = ", ".join(f"[{Path(file).name}](../../{file})" for file in files)
        rows.append((f"`{axis}`", question, " ".join(f"`{entry.name}`" for entry in entries), links))
    return _table(("axis", "question", "words", "mathematics"), rows)


def costs(wing: Wing) -> str:
    """Return the table of what one iteration costs; presets of equal costs share a row."""
    cells = {entry.name: [f"{count:,}" for count in (entry.cost or {}).values()] for entry in presets(wing)}
    return _grouped([column.replace("_", " ") for column in wing.costs.COLUMNS], cells)


def loops(wing: Wing) -> str:
    """Return the table of the sources' loops, without presets of ours; presets of equal loops share a row.

    `-` stands for what a source does not say.
    """
    heads, row = LOOPS[wing.kind]
    return _grouped(heads, {entry.name: row(entry.published) for entry in presets(wing) if _has_source(entry)})


def _has_source(entry: Entry) -> bool:
    return bool(entry.published or entry.not_said)


def _flow_loop(stated: Mapping[str, Any]) -> list[str]:
    guidance = {"none": "none", "pipeline": "{}", "rollout": "{}, rollouts", None: "-"}[stated.get("model.guidance")]
    return [
        guidance.format(stated.get("model.call.guidance_scale")),
        str(stated.get("model.call.num_inference_steps", "-")),
        _size(stated),
        str(stated.get("train.updates", "-")),
        _rate(stated),
        _average(stated.get("train.ema", "-")),
    ]


def _text_loop(stated: Mapping[str, Any]) -> list[str]:
    blocks = stated.get("algorithm.decoder.region.block_length", "one block")
    schedule = stated.get("train.schedule.name")
    return [
        str(stated["model.length"]),
        f"{stated['algorithm.decoder.steps']}, {blocks}" if "algorithm.decoder.steps" in stated else "-",
        _size(stated),
        str(stated["train.passes"]),
        str(stated["train.updates"]),
        _rate(stated) + (f", {schedule}" if schedule else ""),
        "all" if "model.lora" in stated else f"LoRA {stated['model.lora.rank']}",
    ]


LOOPS = {
    "flow": (("guidance", "steps", "groups x size", "optimizer steps", "learning rate", "average"), _flow_loop),
    "mdlm": (("length", "steps, blocks of", "groups x answers", "passes", "updates", "rate", "weights"), _text_loop),
}


def _size(stated: Mapping[str, Any]) -> str:
    groups, size = (str(stated.get(f"train.{key}", "-")) for key in ("groups", "group_size"))
    return "-" if groups == size == "-" else f"{groups} x {size}"


def _rate(stated: Mapping[str, Any]) -> str:
    return f"{stated['train.learning_rate']:.0e}".replace("e-0", "e-") if "train.learning_rate" in stated else "-"


def _average(average: Mapping[str, Any] | str | None) -> str:
    """Return the options of a moving average in words; an average of every iteration says nothing of it."""
    if not isinstance(average, Mapping):
        return average or "none"
    return ", ".join(AVERAGE[key].format(value) for key, value in average.items() if (key, value) != ("every", 1))


def _grouped(heads: Iterable[str], cells: Mapping[str, Sequence[str]]) -> str:
    """Return a table of presets; those with equal cells share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, row in cells.items():
        rows.setdefault(tuple(row), []).append(f"`{name}`")
    return _table(("preset", *heads), [(", ".join(names), *row) for row, names in rows.items()])


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, *rows]
    first, *others = (f"| {' | '.join(line)} |\n" for line in lines)
    return "".join([first, "|---" * len(heads) + "|\n", *others])
