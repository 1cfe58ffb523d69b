"""A model card: how a run was made, what it scored, and lines that make its samples again.

Prompts and answers are anybody's text. Here they stand in commands so that they run as they were written.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flowgrpo.data.prompts import Row
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training import origin
from flowgrpo.training.manifest import read_manifest
from flowgrpo.training.markdown import escaped, fenced, span, table_row
from flowgrpo.training.metric_lines import read_metrics

SAMPLES = 4

RELATIONS = {"lora": "adapter", "full": "finetune"}  # to the base model, in the hub's words


@dataclass(frozen=True)
class Shown:
    """A sample on a card: its prompt and seed, itself, and that of the model before training where the run kept it."""

    row: Row
    after: str
    before: str | None = None


def text(
    head: Sequence[str], *, snippet: str, command: str, made: str, samples: Sequence[Shown], notes: Sequence[str] = ()
) -> str:
    """Return the Markdown of a model card.

    Args:
        head: its first lines; see `heading`.
        snippet, command: Python and shell lines that make the first sample.
        made: what a sample is.
        samples: in Markdown.
        notes: further lines, below the command.
    """
    both = any(sample.before is not None for sample in samples)
    columns = ["prompt", "seed", *([f"{made} before training"] if both else []), made]
    return "\n".join(
        [
            *head,
            fenced("python", snippet),
            "",
            "Or from the command line:",
            "",
            fenced("sh", command),
            "",
            *notes,
            table_row(columns),
            table_row(["---"] * len(columns)),
            *(
                table_row([escaped(s.row.prompt), str(s.row.seed), *([s.before or ""] if both else []), s.after])
                for s in samples
            ),
            "",
        ]
    )


def heading(
    run: Path, settings: RunConfig, *, library: str, kind: str, step: int, task: str, widget: Sequence[Any] = ()
) -> list[str]:
    """The first lines of a model card: how it was made and what it scored.

    Args:
        kind: `lora`, or `full` weights.
        task: what the hub calls it: `text-to-image`, `text-generation` and so on.
        widget: samples for the hub's gallery, maps of `text` and `output`.
    """
    model, algorithm, train = settings.model, settings.algorithm, settings.train
    held_out = [
        m for m in read_metrics(run) if m["phase"] == "eval" and m["step"] <= step and m["reward/mean"] is not None
    ]
    started = model.merge if model.lora is None else model.lora.path
    started = ", ".join(started.values()) if isinstance(started, dict) else started
    base = origin.hub_name(model.path)
    facts = {
        "library_name": library,
        **origin.licence(model.path),
        "pipeline_tag": task,
        **({"base_model": base, "base_model_relation": RELATIONS[kind]} if base else {}),
        "tags": ["flowgrpo", "reinforcement-learning", *(["lora"] if kind == "lora" else [])],
        **({"widget": list(widget)} if widget else {}),
    }
    return [
        "---",
        yaml.safe_dump(facts, sort_keys=False, default_flow_style=None, allow_unicode=True, width=10_000).strip(),
        "---",
        f"# {escaped(settings.run.name)}, step {step}",
        "",
        f"{span(model.path)} aligned by flowgrpo: preset `{algorithm.preset}`, "
        f"{train.groups} prompts x {train.group_size} samples, learning rate {train.learning_rate:g}, "
        f"rewards {', '.join(span(use.use) for use in settings.rewards)}.",
        *([f"Training started from the LoRA {span(started)}, which is in these weights."] if started else []),
        *(
            [
                f"The base was kept in {model.quantise}, as the lines below keep it; on the base as released samples differ "
                "slightly, and the rewards may."
            ]
            if model.quantise
            else []
        ),
        "",
        _means(held_out[0], held_out[-1]) if held_out else "",
        "",
    ]


def _means(first: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    """The held-out means of two metric lines, and of how many samples they are if they are not of equally many."""
    if first is last:
        return f"Held-out reward: {last['reward/mean']:.3f} at step {last['step']}."
    counts = [line.get("reward/count") for line in (first, last)]
    before, after = ("" if None in counts or counts[0] == counts[1] else f" (n = {count})" for count in counts)
    place = f"at step {first['step']}" if first["step"] else "before training"
    return (
        f"Held-out reward: {first['reward/mean']:.3f} {place}{before}, "
        f"{last['reward/mean']:.3f} at step {last['step']}{after}."
    )


def before(run: Path, row: Row) -> Path | None:
    """The file of a sample that the run kept from before training, of the same prompt and seed; None if it kept none."""
    for line in read_manifest(run / "samples"):
        if (line.get("step"), line["prompt"], line.get("seed")) == (0, row.prompt, row.seed):
            file = run / "samples" / line["file"]
            return file if file.is_file() else None
    return None


def command(words: Iterable[str]) -> str:
    """A command line that a POSIX shell splits into these words."""
    return " ".join(_quoted(word) for word in words)


def _quoted(word: str) -> str:
    """A word of a command line; control characters, which Markdown or a terminal would not keep, by their numbers."""
    if not re.search("[\x01-\x08\x0b-\x1f\x7f]", word):
        return shlex.quote(word)
    numbered = re.sub(r"[\x01-\x1f\x7f'\\]", lambda found: f"\\{ord(found[0]):03o}", word)
    return f"$'{numbered}'"


def written(value: Any) -> str:
    """A value as YAML in one line, which is how the command line reads it."""
    line = json.dumps(value, ensure_ascii=False)
    return re.sub("[\x7f-\x9f\u2028\u2029\ufeff]", lambda found: f"\\u{ord(found[0]):04x}", line)


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The result of an export.

    Attributes:
        folder: where everything is.
        step: of the checkpoint.
        kind: `lora`, or `full` weights.
        samples: their files, relative to the folder.
        comfyui: likewise those for ComfyUI.
        url: of the repository that it was uploaded to.
    """

    folder: Path
    step: int
    kind: str
    samples: list[str]
    comfyui: list[str] = field(default_factory=list)
    url: str | None = None
