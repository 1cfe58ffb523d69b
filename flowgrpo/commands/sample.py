"""Samples of prompts by a model, written to a folder with a manifest."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flowgrpo.data import prompts, tables
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.policy import Row
from flowgrpo.training import folders
from flowgrpo.training.samples import Sample, manifest_line

BATCH = 16

SECONDS = 10  # between two lines of progress


def asked(texts: Sequence[str] | None, prompts_file: str | None, seed: int) -> list[Row]:
    """What to sample: texts, or the prompts of a file or a built-in set, prompt i with seed + i.

    Raises:
        InputError: there is no such file, or a text is none.
    """
    tables.check_plain(list(texts or []), "--prompt")
    chosen = [Prompt(text) for text in texts] if texts else prompts.load(prompts_file, "--prompts")
    return [Row(prompt.text, seed + i, prompt.columns) for i, prompt in enumerate(chosen)]


def batches(rows: Sequence[Row], size: int) -> Iterator[Sequence[Row]]:
    """Rows in batches; where they take long, a line on stderr now and then tells how many are done."""
    said = time.monotonic()
    for at in range(0, len(rows), size):
        yield rows[at : at + size]
        if time.monotonic() - said >= SECONDS:
            print(f"{min(at + size, len(rows))} of {len(rows)} samples", file=sys.stderr)
            said = time.monotonic()


def line_of(file: Path, row: Row, sampler: str = "ode") -> dict[str, Any]:
    """The manifest's line of a sample, with the columns of its prompt after its own keys, which win over equal names."""
    own = manifest_line(file.name, Sample(0, row, {}, None), 0, sampler)
    return own | row.columns | own


def check_folder(out: Path) -> None:
    """Refuse a folder that holds samples, or cannot be written to.

    Raises:
        InputError: it is so.
    """
    if (out / "manifest.jsonl").exists():
        raise InputError(f"--out {out}: holds samples already (manifest.jsonl), choose another folder")
    folders.check_writable(out, "--out")
