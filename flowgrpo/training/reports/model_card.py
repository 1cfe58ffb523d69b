"""Model cards: training setup and scores of a run, and code that reproduces its samples; any text is escaped."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flowgrpo.data.embedded import EMBEDDED, place_of
from flowgrpo.data.prompts import Row
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.model_files.hub_files import HUB_ID
from flowgrpo.training.reports.markdown import escape, fence, span, table_row
from flowgrpo.training.run.run_files import read_manifest, read_metrics
from rewards.models import hub

HUB = "https://huggingface.co"
KEYS = ("license", "license_name", "license_link")
SECONDS = 5  # timeout of requests to the hub
SAMPLES = 4
RELATIONS = {"lora": "adapter", "full": "finetune"}  # to the base model, in the hub's words


@dataclass(frozen=True)
class Shown:
    """A prompt on a card: `after` is the sample of the trained model, `before` that of the base model, if there is one."""

    row: Row
    after: str
    before: str | None = None


def text(
    head: Sequence[str], *, snippet: str, command: str, made: str, samples: Sequence[Shown], notes: Sequence[str] = ()
) -> str:
    """Return the Markdown of a model card.

    Args:
        head: the first lines; see `heading`.
        snippet, command: Python and shell code that reproduces the first sample.
        made: the noun for a sample, such as "image".
        notes: lines below the command.
    """
    rows = [["prompt", "seed", f"{made} before training", made], ["---"] * 4]
    rows += [[escape(s.row.prompt), str(s.row.seed), s.before or "", s.after] for s in samples]
    if all(sample.before is None for sample in samples):
        rows = [[prompt, seed, after] for prompt, seed, _, after in rows]
    code = [fence("python", snippet), "", "Or from the command line:", "", fence("sh", command), ""]
    return "\n".join([*head, *code, *notes, *map(table_row, rows), ""])


def heading(
    run: Path, settings: RunConfig, *, library: str, kind: str, step: int, task: str, widget: Sequence[Any] = ()
) -> list[str]:
    """Return the first lines of a model card: front matter, training setup and scores.

    Args:
        kind: `lora`, or `full` for full weights.
        step: the exported iteration; later evaluations are not shown.
        task, widget: the hub's `pipeline_tag` and `widget`, a list of maps of `text` and `output`.
    """
    model, algorithm, train = settings.model, settings.algorithm, settings.train
    evaluated = [line for line in read_metrics(run) if line["phase"] == "eval" and line["step"] <= step]
    held_out = [line for line in evaluated if line["reward/mean"] is not None]
    started = model.merge if model.lora is None else model.lora.path
    started = ", ".join(started.values()) if isinstance(started, dict) else started
    base = hub_name(model.path)
    facts = {
        "library_name": library,
        **licence(model.path),
        "pipeline_tag": task,
        **({"base_model": base, "base_model_relation": RELATIONS[kind]} if base else {}),
        "tags": ["flowgrpo", "reinforcement-learning", *(["lora"] if kind == "lora" else [])],
        **({"widget": list(widget)} if widget else {}),
    }
    front = yaml.safe_dump(facts, sort_keys=False, default_flow_style=None, allow_unicode=True, width=10_000).strip()
    lines = [
        *("---", front, "---", f"# {escape(settings.run.name)}, step {step}", ""),
        f"{span(model.path)} aligned by flowgrpo: preset `{algorithm.preset}`, "
        f"{train.groups} prompts x {train.group_size} samples, learning rate {train.learning_rate:g}, "
        f"rewards {', '.join(span(use.use) for use in settings.rewards)}.",
    ]
    if started:
        lines.append(f"Training started from the LoRA {span(started)}, which is in these weights.")
    if model.quantise:
        lines.append(
            f"The base was kept in {model.quantise}, as the lines below keep it; on the base as released samples differ "
            "slightly, and the rewards may."
        )
    return [*lines, "", _means(held_out[0], held_out[-1]) if held_out else "", ""]


def _means(first: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    """Return a sentence with the held-out rewards of two metric lines, and with sample counts if these differ."""
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
    """Return the file of the base model's sample (step 0) for a prompt and seed; None if there is none."""
    for line in read_manifest(run / "samples"):
        if (line.get("step"), line["prompt"], line.get("seed")) == (0, row.prompt, row.seed):
            file = run / "samples" / line["file"]
            return file if file.is_file() else None
    return None


def command(words: Iterable[str]) -> str:
    """Return words as one POSIX shell command line, quoted, with control characters escaped."""
    return " ".join(map(_quote, words))


def _quote(word: str) -> str:
    if not re.search("[\x01-\x08\x0b-\x1f\x7f]", word):
        return shlex.quote(word)
    numbered = re.sub(r"[\x01-\x1f\x7f'\\]", lambda found: f"\\{ord(found[0]):03o}", word)
    return f"$'{numbered}'"


def format_value(value: Any) -> str:
    """Return a value as one line of YAML that the command line can read."""
    line = json.dumps(value, ensure_ascii=False)
    return re.sub("[\x7f-\x9f\u2028\u2029\ufeff]", lambda found: f"\\u{ord(found[0]):04x}", line)


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The result of an export."""

    folder: Path  # folder of all exported files
    step: int  # step of the checkpoint
    kind: str  # `lora`, or `full` for full weights
    samples: list[str]  # sample files, relative to the folder
    comfyui: list[str] = field(default_factory=list)  # ComfyUI files, relative to the folder
    url: str | None = None  # URL of the uploaded repository


def hub_name(path: str) -> str | None:
    """Return a model's hub id: the path itself, or the id in a local folder's index or config; None if unknown."""
    if not Path(place_of(path)).is_dir():
        return path if re.fullmatch(HUB_ID, path) else None
    for file in ("model_index.json", "config.json"):
        try:
            named = json.loads((Path(place_of(path)) / file).read_text(encoding="utf-8")).get("_name_or_path")
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(named, str) and re.fullmatch(HUB_ID, named) and not Path(named).exists():
            return named
    return None


def licence(path: str) -> dict[str, str]:
    """Return the licence keys of a card's front matter, copied from the model's own card, or else `other` and a link."""
    if path in EMBEDDED:
        return {"license": "apache-2.0"}
    name = hub_name(path)
    front = _front_matter(_card_text(path))
    known = {key: str(front[key]) for key in KEYS if isinstance(front.get(key), str)}
    if "license" not in known:
        known = {"license": "other", "license_name": "as-the-base-model"}
    if known["license"] == "other" and name is not None and "://" not in known.get("license_link", ""):
        file = known.get("license_link", "")
        known["license_link"] = f"{HUB}/{name}/blob/main/{file}" if file else f"{HUB}/{name}"
    return known


def _card_text(path: str) -> str:
    file = Path(path) / "README.md"
    if not Path(path).is_dir():
        import huggingface_hub

        try:
            with hub.cache_if_unreachable(path):
                file = Path(huggingface_hub.hf_hub_download(path, "README.md", etag_timeout=SECONDS))
        except Exception:  # no card, no access, no network
            return ""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _front_matter(text: str) -> dict[str, Any]:
    match = re.match(r"\ufeff?---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    try:
        front = yaml.safe_load(match[1]) if match else {}
    except yaml.YAMLError:
        return {}
    return front if isinstance(front, dict) else {}
