"""Broken tables of prompts: each is refused in a sentence, or read to texts and plain columns.

A case is the name of a file and its bytes: the same rows in every layout and in several encodings, with bytes changed, put
in, taken out or cut off.
"""

import io
import json
import tempfile
from functools import cache
from pathlib import Path

from hypothesis import strategies as st

from flowgrpo.data import prompts
from flowgrpo.errors import InputError
from flowgrpo.schema.readable import one_line
from fuzzing.runner import Summary, run

ROWS = [
    {"prompt": "a red fox", "n": 1},
    {"prompt": "ein blauer Würfel", "n": None},
    {"prompt": 'a "so called" cat; one, two', "n": 3},
]
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "latin1")
INSERTED = (b"\0", b",", b";", b'"', b"\n", b"{", b"]", b"\xff\xfe", b"prompt", b'"prompt": "x", ')
Case = tuple[str, bytes]


@cache
def whole() -> dict[str, bytes]:
    found = {}
    for encoding in ENCODINGS:
        for suffix, delimiter in ((".csv", ","), (".csv", ";"), (".tsv", "\t")):
            cells = [["prompt", "n"], *([row["prompt"], str(row["n"] or "")] for row in ROWS)]
            quoted = [delimiter.join('"' + cell.replace('"', '""') + '"' for cell in line) for line in cells]
            found[f"{encoding}{delimiter}{suffix}"] = "\r\n".join(quoted).encode(encoding)
        found[f"{encoding}.json"] = json.dumps(ROWS, ensure_ascii=False).encode(encoding)
        found[f"{encoding}.jsonl"] = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode(encoding)
        found[f"{encoding}.txt"] = "\n".join(row["prompt"] for row in ROWS).encode(encoding)
    import pyarrow
    from pyarrow import parquet

    stamps = pyarrow.array([1_704_067_200_123_456_789] * len(ROWS), pyarrow.timestamp("ns"))
    table = pyarrow.Table.from_pylist(ROWS).append_column("when", stamps)
    buffer = io.BytesIO()
    parquet.write_table(table, buffer)
    return {**found, "a.parquet": buffer.getvalue()}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a file, changed in up to three places."""
    name = draw(st.sampled_from(sorted(whole())))
    data = bytearray(whole()[name])
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(("flip", "insert", "remove", "cut", "repeat"))):
            case "flip" if at < len(data):
                data[at] ^= draw(st.integers(1, 255))
            case "insert":
                data[at:at] = draw(st.sampled_from(INSERTED))
            case "remove":
                del data[at : at + draw(st.integers(1, 8))]
            case "cut":
                del data[at:]
            case "repeat":
                data[at:at] = data[: draw(st.integers(1, 40))]
    return Path(name).suffix, bytes(data)


def attempt(case: Case) -> str | None:
    """Read a table; fail where anything but texts and plain columns comes."""
    suffix, data = case
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"p{suffix}"
        file.write_bytes(data)
        try:
            found = prompts.load(str(file), "prompts.train")
        except InputError as error:
            return one_line(str(error))  # as the terminal shows it
    for prompt in found:
        assert prompt.text.strip()
        assert "\0" not in prompt.text
        json.dumps(prompt.columns)
    return None


def fuzz(seed: int, count: int) -> Summary:
    whole()
    return run("tables", cases(), attempt, seed, count)
