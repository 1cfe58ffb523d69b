"""Read tables (`SUFFIXES`) and JSON, with one-sentence errors; each row comes with its place for messages."""

from __future__ import annotations

import codecs
import csv
import json
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from io import StringIO
from itertools import chain, islice
from pathlib import Path
from typing import Any

from flowgrpo.errors import InputError
from flowgrpo.schema.readable import one_line

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
DELIMITERS = {".csv": ",;", ".tsv": "\t"}
MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
EXAMPLE = '{"prompt": "a red circle"}'
LARGEST = 1 << 30  # file size in bytes
LARGEST_INTEGER = 14_000  # bits, some 4,200 digits
DEEPEST = 64  # nesting of lists and maps
POINTER, LARGEST_POINTER = b"version https://git-lfs.github.com/spec/", 1024  # first bytes, largest size

Row = dict[str, Any]


def lines(path: Path, key: str) -> list[tuple[int, str]]:
    """Return the non-empty, stripped lines of a UTF-8 (or marked UTF-16) file with numbers from 1; `key` is for errors."""
    text = _read_text(path, key).replace("\r\n", "\n").replace("\r", "\n")
    stripped = ((number, line.strip()) for number, line in enumerate(text.split("\n"), start=1))
    return [(number, line) for number, line in stripped if line]


def rows(
    path: Path, key: str, columns: Sequence[str] | None = None, *, needed: str | None = None
) -> list[tuple[str, Row]]:
    """Return the rows of a table, each with its place: the file, and the line or row number from 1.

    A .json file is an array of objects, or of texts, which become the column `prompt`. Cells of .csv (comma or
    semicolon) and .tsv files are texts, None if empty; the first line names the columns. In .parquet files, columns of
    bytes (pictures, sounds) are skipped, times become texts, and decimals become floats. Raises InputError if the file
    cannot be read, a line is not a row, or a column name is repeated.

    Args:
        key: the setting named in errors.
        columns: columns to read from a .parquet file; by default all.
        needed: a column that must not hold bytes.
    """
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return [
            (f"{path}:{number}", row) for number, row in enumerate(_read_parquet(path, key, columns, needed), start=1)
        ]
    if suffix in DELIMITERS:
        return _read_separated(path, key, needed)
    if suffix == ".json":
        return _read_array(path, key)
    return [(f"{path}:{number}", _object(line, f"{path}:{number}")) for number, line in lines(path, key)]


def log(path: Path) -> list[tuple[str, Row]]:
    """Return the objects of a .jsonl log with their places; none if the file is missing.

    A truncated last line (crash, full disk) is skipped with a warning; other malformed lines raise InputError.
    """
    written = enumerate(_read_bytes(path).split(b"\n") if path.is_file() else [], start=1)
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
    """Return the value of a JSON file. Raises InputError if it cannot be read, or is not valid JSON."""
    return value(_read_bytes(path).decode(errors="replace"), str(path))


def value(text: str, place: str, *, of_row: bool = False) -> Any:
    """Return the value of a JSON text, or raise InputError; with `of_row`, also for a repeated key."""
    try:
        parsed = json.loads(text, object_pairs_hook=partial(_unique, place) if of_row else None)
    except InputError:
        raise
    except json.JSONDecodeError as error:
        raise InputError(f"{place}: not valid JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise InputError(f"{place}: lists and maps are nested deeper than {DEEPEST}") from None
    except ValueError as error:  # a number of thousands of digits
        raise InputError(f"{place}: not valid JSON ({error})") from None
    check_plain(parsed, place)
    return parsed


def _unique(place: str, pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        doubled = _first_repeated([key for key, _ in pairs])
        raise InputError(f"{place}: the key {doubled!r} stands there twice")
    return row


def _first_repeated(names: Sequence[str]) -> str | None:
    return next((name for i, name in enumerate(names) if name in names[:i]), None)


def check_plain(value: Any, place: str) -> None:
    """Raise InputError for values that later steps cannot handle: deep nesting, huge integers, lone surrogates."""
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
    """Return the text in a column of a row. Raises InputError if the column is missing or holds no text."""
    if column not in row:
        raise InputError(f"{place}: the row has no key {column!r}, it has {', '.join(row) or 'none'}")
    if not isinstance(row[column], str) or not row[column].strip():
        raise InputError(f"{place}: {column} is {row[column]!r}, not a text")
    return row[column]


def refuse_pointer(file: Path, place: str) -> None:
    """Raise InputError if a file is a Git LFS pointer; in the message `place` stands before the path."""
    if not file.is_file() or file.stat().st_size > LARGEST_POINTER:
        return
    with file.open("rb") as opened:
        if opened.read(len(POINTER)) == POINTER:
            raise InputError(f"{place}{file} is a Git LFS pointer, not the file itself; run git lfs pull in its folder")


def _read_text(path: Path, key: str) -> str:
    data = _read_bytes(path)
    mark = next((mark for mark in MARKS if data.startswith(mark)), b"")
    try:
        text = data[len(mark) :].decode(MARKS.get(mark, "utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{key}: {path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    if "\0" in text:  # UTF-16 without a byte order mark
        raise InputError(f"{key}: {path} is not UTF-8 text (it holds zero bytes); save it as UTF-8")
    return text


def _read_array(path: Path, key: str) -> list[tuple[str, Row]]:
    written = value(_read_text(path, key), str(path), of_row=True)
    if not isinstance(written, list):
        kind = "an object" if isinstance(written, dict) else type(written).__name__
        raise InputError(f"{path}: holds {kind}, not an array of texts or of objects such as {EXAMPLE}")
    return [
        (f"{path}:{i}", _row({"prompt": item} if isinstance(item, str) else item, f"{path}:{i}"))
        for i, item in enumerate(written, 1)
    ]


def _read_separated(path: Path, key: str, needed: str | None) -> list[tuple[str, Row]]:
    text = _read_text(path, key)
    delimiter, skipped = _declared_delimiter(path, text), 1
    if delimiter is None:
        delimiter, skipped = _delimiter(path, text, needed), 0
    lines = islice(StringIO(text, newline=""), skipped, None)
    reader = csv.DictReader(lines, strict=True, delimiter=delimiter)
    rows = []
    try:
        reader.fieldnames = names = [name.strip() for name in reader.fieldnames or ()]
        if (doubled := _first_repeated(names)) is not None:
            raise InputError(f"{path}:{1 + skipped}: two columns are called {doubled!r}")
        for row in reader:
            place = f"{path}:{reader.line_num + skipped}"
            if None in row:
                raise InputError(
                    f"{place}: the row has more cells than the first line names ({', '.join(names)}); quote cells that hold "
                    f"{delimiter!r}"
                )
            rows.append((place, {name: cell or None for name, cell in row.items()}))
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num + skipped}: not a line of a {path.suffix} file ({error})") from None
    return rows


def _declared_delimiter(path: Path, text: str) -> str | None:
    """Return the delimiter that a first line `sep=;` declares, as Excel writes it; None without one."""
    first = next(StringIO(text, newline=""), "").strip(" \r\n").strip('"')
    if not first.lower().startswith("sep=") or len(first) != len("sep=") + 1:
        return None
    allowed = DELIMITERS[path.suffix.lower()]
    if first[-1] not in allowed + "\t":
        raise InputError(
            f"{path}:1: declares {first[-1]!r} as its delimiter, take one of {', '.join(map(repr, allowed))}"
        )
    return first[-1]


def _delimiter(path: Path, text: str, needed: str | None) -> str:
    """Guess the delimiter: it splits the first line into columns with `needed` among them, or else into several columns."""
    first, names = next(StringIO(text, newline=None), "").rstrip("\n"), {}
    for delimiter in DELIMITERS[path.suffix.lower()]:
        with suppress(csv.Error):
            names[delimiter] = [name.strip() for name in next(csv.reader([first], delimiter=delimiter), [])]
    if has := [delimiter for delimiter, columns in names.items() if needed in columns]:
        return has[0]
    several = [delimiter for delimiter, columns in names.items() if len(columns) > 1]
    if len(several) > 1:
        raise InputError(f"{path}:1: the first line has both commas and semicolons, so that its columns are not clear")
    return several[0] if several else DELIMITERS[path.suffix.lower()][0]


def _read_parquet(path: Path, key: str, columns: Sequence[str] | None, needed: str | None) -> list[Row]:
    try:
        from pyarrow import ArrowException, parquet
        from pyarrow import schema as schema_of
    except ModuleNotFoundError:
        raise InputError(
            f"{key}: {path} needs pyarrow to be read, pip install 'flowgrpo[parquet]' or save it as .jsonl"
        ) from None
    try:
        refuse_pointer(path, f"{key}: ")
        schema = parquet.read_schema(path)
        if (doubled := _first_repeated(schema.names)) is not None:
            raise InputError(f"{path}: two columns are called {doubled!r}")
        if needed in schema.names and _holds_bytes(schema.field(needed).type):
            raise InputError(f"{path}: the column {needed!r} holds bytes ({schema.field(needed).type}), not texts")
        readable = [f.name for f in schema if not _holds_bytes(f.type) and (columns is None or f.name in columns)]
        table = parquet.read_table(path, columns=readable)
        return table.cast(schema_of([(f.name, _plain_type(f.type)) for f in table.schema])).to_pylist()
    except InputError:
        raise
    except (ArrowException, OSError, ValueError, OverflowError) as error:  # pyarrow raises them for damaged pages
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{key}: {path} is not a readable parquet file ({reason})") from None


def _holds_bytes(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _holds_bytes(kind.storage_type)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _holds_bytes(kind.value_type)
    if types.is_nested(kind):
        return any(_holds_bytes(kind.field(i).type) for i in range(kind.num_fields))
    of_bytes = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view)
    return any(is_kind(kind) for is_kind in of_bytes)


def _plain_type(kind: Any) -> Any:
    """Return a type that JSON can hold for an Arrow type: times as texts, decimals as floats."""
    import pyarrow as pa

    if pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_time(kind):
        return pa.string()
    if pa.types.is_duration(kind):
        return pa.int64()  # in its own unit
    if pa.types.is_decimal(kind) or pa.types.is_float16(kind):
        return pa.float64()
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain_type(kind.value_type))
    if pa.types.is_map(kind):  # a list of pairs
        return pa.map_(_plain_type(kind.key_type), _plain_type(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _plain_type(field.type)) for field in kind])
    return kind


def _object(line: str, place: str) -> Row:
    return _row(value(line, place, of_row=True), place)


def _row(row: Any, place: str) -> Row:
    if not isinstance(row, dict):
        raise InputError(f"{place}: a row is an object such as {EXAMPLE}, not {type(row).__name__}")
    return row


def _read_bytes(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise InputError(f"{path}: has {size} bytes, at most {LARGEST} are read")
        refuse_pointer(path, "")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
