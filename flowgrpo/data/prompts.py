"""Prompts: their sources, and the order in which iterations take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from flowgrpo.data import conditions, corpora, hub, tables
from flowgrpo.data.generators import (
    clips,
    compositions,
    edits,
    moves,
    patterned,
    scenes,
    sounds,
    tasks,
    templates,
    writing,
)
from flowgrpo.errors import InputError
from flowgrpo.schema.sections import Prompts
from rewards.base import nearest
from samplers import noise

SPLITS = ("train", "eval")
STEPS = "num_inference_steps"
LONGEST_NUMBER = 1000  # characters; Python reads some 4,000 digits


SMALL: dict[str, Callable[[], list[tables.Row]]] = {  # for the embedded models
    f"{name}:{split}": lambda captions=captions, split=split: [{"prompt": text} for text in captions(split)]
    for name, captions in (("shapes", scenes.captions), ("patterns", patterned.captions), ("clips", clips.captions))
    for split in SPLITS
} | tasks.BUILT_IN
EXAMPLE = "shapes:train"
BUILT_IN = SMALL | compositions.BUILT_IN | writing.BUILT_IN | moves.BUILT_IN | sounds.BUILT_IN


@dataclass(frozen=True)
class Prompt:
    """A prompt and the further columns of its row, which rewards receive."""

    text: str
    columns: dict[str, Any] = field(default_factory=dict, hash=False)


def load_split(section: Prompts, split: str) -> list[Prompt]:
    """Return the prompts of a config's split, `train` or `eval`; errors are those of `load`."""
    return load(getattr(section, split), f"prompts.{split}", **section.load_options)


def load(
    source: str, key: str = "prompts", *, column: str = "prompt", folder: str = "data", template: str | None = None
) -> list[Prompt]:
    """Return the prompts of a built-in set, a corpus, a hub dataset (hub:owner/name:split), a .txt file or a table.

    Missing columns of a row are None, and empty lines are skipped. File names of pictures, videos and sounds are
    relative to the table and become absolute. Raises InputError if there is no such source, or a line is malformed.

    Args:
        key: the setting named in errors.
        column: the prompt's column in a table or hub dataset.
        folder: folder of the corpora; see `flowgrpo.data.corpora`.
        template: a name in `flowgrpo.data.generators.templates`, applied to every prompt.
    """
    prompts = [
        Prompt(templates.apply(template, row["prompt"]), {k: _cell(k, v) for k, v in row.items() if k != "prompt"})
        for row in _rows(source, key, column=column, folder=folder)
    ]
    if not prompts:
        raise InputError(f"{key}: {source} holds no prompt")
    return prompts


def _cell(name: str, cell: Any) -> Any:
    """Convert a cell of the column `num_inference_steps` from text to int; return other cells unchanged."""
    is_number = name == STEPS and isinstance(cell, str) and cell.strip().isdecimal() and len(cell) < LONGEST_NUMBER
    return int(cell) if is_number else cell


def _rows(source: str, key: str, *, column: str, folder: str) -> list[tables.Row]:
    if source in BUILT_IN:
        return BUILT_IN[source]()
    if source in edits.NAMES:
        return edits.load(source, folder, key)
    if corpora.is_corpus(source):
        return _fill_missing_columns(corpora.load(source, folder, key))
    if hub.is_dataset(source):
        return _with_prompt_column(hub.rows(source, key, column), column)
    path = Path(source)
    if not path.is_file():
        raise InputError(f"{key}: there is no file {source}{_advise(path)}")
    if path.suffix.lower() == ".txt":
        return [{"prompt": line} for _, line in tables.lines(path, key)]
    if path.suffix.lower() not in tables.SUFFIXES:
        *others, last = tables.SUFFIXES
        raise InputError(
            f"{key}: {source} is neither a .txt file (one prompt per line) nor a {', '.join(others)} or {last} file"
        )
    return [
        {name: cell if name == "prompt" else conditions.resolve_files(cell, path.parent) for name, cell in row.items()}
        for row in _with_prompt_column(tables.rows(path, key, needed=column), column)
    ]


def _advise(missing: Path) -> str:
    """Return the end of the sentence about a missing file: a file of a similar name, or to write it."""
    suffix = missing.suffix.lower()
    suffixes = (".txt", *tables.SUFFIXES)
    files = [path for path in sorted(missing.parent.glob("[!.]*")) if path.suffix.lower() in suffixes]
    if suffix in suffixes:
        close = get_close_matches(missing.stem, [path.stem for path in files], 1)
        files = [path for path in files if path.stem in close]
        if not files:
            write = "write one prompt a line into it" if suffix == ".txt" else "write it"
            return f"; {write}, or take a built-in set such as {EXAMPLE}"
    built_in = [] if files and suffix else [*BUILT_IN, *edits.NAMES, *corpora.NAMES]
    return f", {nearest(str(missing), [*built_in, *map(str, files)])}"


def _with_prompt_column(rows: list[tuple[str, tables.Row]], column: str) -> list[tables.Row]:
    """Rename the prompt's column to `prompt`, and drop another column of that name."""
    renamed = []
    for place, row in rows:
        if column not in row:
            raise InputError(
                f"{place}: the row has no key {column!r}, it has {', '.join(row) or 'none'}; prompts.column "
                "(--column of a command) names the one that holds the prompt"
            )
        further = {name: cell for name, cell in row.items() if name not in ("prompt", column)}
        renamed.append({"prompt": tables.text(row, column, place), **further})
    return _fill_missing_columns(renamed)


def _fill_missing_columns(rows: list[tables.Row]) -> list[tables.Row]:
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def shuffle(number: int, groups: int, seed: int, iteration: int) -> list[int]:
    """Return the prompt indices of an iteration's groups, from an endless sequence of shuffled epochs over `number` prompts.

    It is a pure function, so resuming needs no state. A prompt may occur twice where an epoch ends within an iteration.
    """
    chosen = []
    for position in range(iteration * groups, (iteration + 1) * groups):
        epoch, index = divmod(position, number)
        chosen.append(int(noise.generator(seed, "prompts", epoch).permutation(number)[index]))
    return chosen


@dataclass(frozen=True)
class Row:
    """A sample's condition: a prompt with further columns, and the seed of its initial noise.

    The stock pipeline starts from the same noise with `torch.Generator("cpu").manual_seed(seed)`. Columns with names of
    pipeline arguments (`image`, `negative_prompt`, ...) are passed to it.
    """

    prompt: str
    seed: int
    columns: dict[str, Any] = field(default_factory=dict, hash=False)
