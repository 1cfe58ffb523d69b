"""Rows of a .jsonl or a .parquet file, each with the place that errors name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flowgrpo.errors import InputError

SUFFIXES = (".jsonl", ".parquet")

Row = dict[str, Any]


def lines(path: Path, key: str) -> list[tuple[int, str]]:
    """The lines of a text file that are not empty, stripped, with their numbers from 1.

    Args:
        key: the place named in errors.

    Raises:
        InputError: the file is not UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{key}: {path} is not UTF-8 text (byte {error.start})") from None
    stripped = ((number, line.strip()) for number, line in enumerate(text.split("\n"), start=1))
    return [(number, line) for number, line in stripped if line]


def rows(path: Path, key: str) -> list[tuple[str, Row]]:
    """The rows of a .jsonl or .parquet file, each with its place: the file, and the line or the row from 1.

    Args:
        key: the place named in errors.

    Raises:
        InputError: the file cannot be read, or a line is no JSON object.
    """
    if path.suffix == ".parquet":
        return [(f"{path}:{number}", row) for number, row in enumerate(_parquet(path, key), start=1)]
    return [(f"{path}:{number}", _object(line, f"{path}:{number}")) for number, line in lines(path, key)]


def text(row: Row, column: str, place: str) -> str:
    """The text in a column of a row.

    Raises:
        InputError: the row has no such column, or no text there.
    """
    if column not in row:
        raise InputError(f"{place}: the row has no key {column!r}, it has {', '.join(row) or 'none'}")
    if not isinstance(row[column], str) or not row[column].strip():
        raise InputError(f"{place}: {column} is {row[column]!r}, not a text")
    return row[column]


def _parquet(path: Path, key: str) -> list[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError:
        raise InputError(
            f"{key}: {path} needs pyarrow to be read, pip install 'flowgrpo[parquet]' or save it as .jsonl"
        ) from None
    try:
        return parquet.read_table(path).to_pylist()
    except ArrowException as error:
        raise InputError(f"{key}: {path} is no readable parquet file ({str(error).splitlines()[0]})") from None


def _object(line: str, place: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{place}: not valid JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(row, dict):
        raise InputError(f'{place}: a row is an object such as {{"prompt": "a red circle"}}, not {type(row).__name__}')
    return row
