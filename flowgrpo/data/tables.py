"""Rows of a .jsonl, .csv or .parquet file, each with the place that errors name, and what JSON of others may hold."""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Sequence
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any

from flowgrpo.errors import InputError
from flowgrpo.schema.readable import one_line

SUFFIXES = (".jsonl", ".csv", ".parquet")
LARGEST = 1 << 30  # bytes of a file that is read whole
LARGEST_INTEGER = 14_000  # bits, some 4,200 digits
DEEPEST = 64  # lists and maps in each other

Row = dict[str, Any]


def lines(path: Path, key: str) -> list[tuple[int, str]]:
    """The lines of a text file that are not empty, stripped, with their numbers from 1.

    Args:
        key: the place named in errors.

    Raises:
        InputError: the file is not UTF-8.
    """
    stripped = ((number, line.strip()) for number, line in enumerate(_text(path, key).split("\n"), start=1))
    return [(number, line) for number, line in stripped if line]


def rows(path: Path, key: str, columns: Sequence[str] | None = None) -> list[tuple[str, Row]]:
    """The rows of a .jsonl, .csv or .parquet file, each with its place: the file, and the line or the row from 1.

    Cells of a .csv file, whose first line names the columns, are texts, None where they are empty. Columns of a .parquet
    file that hold bytes (pictures, sounds) are left out.

    Args:
        key: the place named in errors.
        columns: of a .parquet file, those that are read; by default all.

    Raises:
        InputError: the file cannot be read, or a line is not a row.
    """
    if path.suffix == ".parquet":
        return [(f"{path}:{number}", row) for number, row in enumerate(_parquet(path, key, columns), start=1)]
    if path.suffix == ".csv":
        return _separated(path, key)
    return [(f"{path}:{number}", _object(line, f"{path}:{number}")) for number, line in lines(path, key)]


def log(path: Path) -> list[tuple[str, Row]]:
    """The objects of a .jsonl file that is written line by line, each with its place; none if there is no such file.

    A last line that a crash or a full disk cut off is left out, with a warning.

    Raises:
        InputError: another line is not a JSON object, or the file cannot be read.
    """
    written = enumerate(_bytes(path).split(b"\n") if path.is_file() else [], start=1)
    lines = [(f"{path}:{number}", line) for number, line in written if line.strip()]
    rows = []
    for place, line in lines:
        try:
            rows.append((place, _object(line.decode(errors="replace"), place)))
        except InputError as error:
            if place != lines[-1][0]:
                raise
            warnings.warn(one_line(f"{error}; it is the last line, cut off, and left out"), stacklevel=2)
    return rows


def document(path: Path) -> Any:
    """The value of a JSON file.

    Raises:
        InputError: it cannot be read, or is not valid JSON.
    """
    return value(_bytes(path).decode(errors="replace"), str(path))


def value(text: str, place: str) -> Any:
    """The value of a JSON text.

    Args:
        place: named in errors.

    Raises:
        InputError: it is not valid JSON, or holds what `check_plain` refuses.
    """
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{place}: not valid JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise InputError(f"{place}: lists and maps are nested deeper than {DEEPEST}") from None
    except ValueError as error:  # a number of thousands of digits
        raise InputError(f"{place}: not valid JSON ({error})") from None
    check_plain(parsed, place)
    return parsed


def check_plain(value: Any, place: str) -> None:
    """Refuse what no further step can be expected to take, though JSON and YAML can write it.

    Raises:
        InputError: lists and maps are nested deeper than `DEEPEST`; a whole number is larger than Python writes down; or a
            text has half of a surrogate pair, which is not a character and cannot be encoded.
    """
    waiting = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError as error:
                raise InputError(f"{place}: the text {item[:40]!a} has half a character ({error.reason})") from None
        elif isinstance(item, int) and item.bit_length() > LARGEST_INTEGER:
            raise InputError(f"{place}: a whole number of {item.bit_length()} bits is more than Python writes down")
        elif isinstance(item, dict | list | tuple | set):
            if depth == DEEPEST:
                raise InputError(f"{place}: lists and maps are nested deeper than {DEEPEST}")
            waiting += [(inner, depth + 1) for inner in (chain(*item.items()) if isinstance(item, dict) else item)]


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


def _text(path: Path, key: str) -> str:
    try:
        return _bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{key}: {path} is not UTF-8 text (byte {error.start})") from None


def _separated(path: Path, key: str) -> list[tuple[str, Row]]:
    reader = csv.DictReader(StringIO(_text(path, key), newline=""), strict=True)
    found = []
    try:
        for row in reader:
            place = f"{path}:{reader.line_num}"
            if None in row:
                names = ", ".join(reader.fieldnames)
                raise InputError(f"{place}: the row has more cells than the first line names ({names}); quote commas")
            found.append((place, {name: cell or None for name, cell in row.items()}))
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num}: not a line of a .csv file ({error})") from None
    return found


def _parquet(path: Path, key: str, columns: Sequence[str] | None) -> list[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError:
        raise InputError(
            f"{key}: {path} needs pyarrow to be read, pip install 'flowgrpo[parquet]' or save it as .jsonl"
        ) from None
    try:
        schema = parquet.read_schema(path)
        readable = [f.name for f in schema if "binary" not in str(f.type) and (columns is None or f.name in columns)]
        return parquet.read_table(path, columns=readable).to_pylist()
    except ArrowException as error:
        raise InputError(f"{key}: {path} is not a readable parquet file ({str(error).splitlines()[0]})") from None


def _object(line: str, place: str) -> Row:
    row = value(line, place)
    if not isinstance(row, dict):
        raise InputError(f'{place}: a row is an object such as {{"prompt": "a red circle"}}, not {type(row).__name__}')
    return row


def _bytes(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise InputError(f"{path}: has {size} bytes, at most {LARGEST} are read")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
