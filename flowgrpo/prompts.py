"""Prompts: where they are read from, and which ones an iteration trains on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowgrpo import conditions
from flowgrpo.errors import InputError, nearest
from flowgrpo.mdlm import tasks
from flowgrpo.shapes import scenes
from samplers import noise

SPLITS = ("train", "eval")
BUILT_IN: dict[str, Callable[[], list[dict[str, Any]]]] = {
    **{
        f"shapes:{split}": lambda split=split: [{"prompt": text} for text in scenes.captions(split)] for split in SPLITS
    },
    **tasks.BUILT_IN,
}


@dataclass(frozen=True)
class Prompt:
    """A prompt and the further columns of its row, which rewards receive."""

    text: str
    columns: dict[str, Any] = field(default_factory=dict, hash=False)


def load(source: str, key: str = "prompts") -> list[Prompt]:
    """Prompts of a built-in set, of a .txt file (one per line) or of a .jsonl file (`prompt` and any further columns).

    A column that a row of the file lacks is None there. Empty lines are skipped. Names of pictures, videos and sounds become
    absolute paths; they are relative to the file.

    Args:
        key: the place named in errors.

    Raises:
        InputError: there is no such source, or a line of it is wrong.
    """
    if source in BUILT_IN:
        return [_prompt(row) for row in BUILT_IN[source]()]
    path = Path(source)
    if not path.is_file():
        known = [*BUILT_IN, *(str(p) for p in path.parent.glob("*") if p.suffix in (".txt", ".jsonl"))]
        raise InputError(f"{key}: there is no file {source}, {nearest(source, known)}")
    if path.suffix not in (".txt", ".jsonl"):
        raise InputError(f"{key}: {source} is neither a .txt file (one prompt per line) nor a .jsonl file")
    try:
        lines = [(i, line.strip()) for i, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1)]
    except UnicodeDecodeError as error:
        raise InputError(f"{key}: {source} is not UTF-8 text (byte {error.start})") from None
    if path.suffix == ".txt":
        prompts = [Prompt(line) for _, line in lines if line]
    else:
        rows = [_row(line, f"{source}:{i}") for i, line in lines if line]
        names = dict.fromkeys(name for row in rows for name in row if name != "prompt")
        prompts = [
            Prompt(row["prompt"], {name: conditions.resolved(row.get(name), path.parent) for name in names})
            for row in rows
        ]
    if not prompts:
        raise InputError(f"{key}: {source} holds no prompt")
    return prompts


def _prompt(row: dict[str, Any]) -> Prompt:
    return Prompt(row["prompt"], {name: cell for name, cell in row.items() if name != "prompt"})


def _row(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{place}: not valid JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(row, dict):
        raise InputError(f'{place}: a row is an object such as {{"prompt": "a red circle"}}, not {type(row).__name__}')
    if "prompt" not in row:
        raise InputError(f"{place}: the row has no key 'prompt', it has {', '.join(row) or 'none'}")
    if not isinstance(row["prompt"], str) or not row["prompt"].strip():
        raise InputError(f"{place}: prompt is {row['prompt']!r}, not a text")
    return row


def shuffled(number: int, groups: int, seed: int, iteration: int) -> list[int]:
    """Places of the prompts of an iteration's groups: the next of an endless row of shuffled passes over all `number`.

    A pure function of its arguments, so it needs no state to resume. A prompt comes back only after all others have
    come; where a pass ends inside an iteration the same prompt may stand in two groups, each with its own integer.
    """
    chosen = []
    for position in range(iteration * groups, (iteration + 1) * groups):
        epoch, place = divmod(position, number)
        chosen.append(int(noise.generator(seed, "prompts", epoch).permutation(number)[place]))
    return chosen
