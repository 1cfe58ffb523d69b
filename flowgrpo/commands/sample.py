"""Samples of prompts by a model, written to a folder with a manifest."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flowgrpo.commands.kinds import KINDS, kind_of
from flowgrpo.data import prompts, tables
from flowgrpo.data.prompts import Prompt, Row
from flowgrpo.errors import InputError
from flowgrpo.training import folders
from flowgrpo.training.samples import ModelUse, Sample, manifest_line, save_sample
from samplers.batches import batched

BATCH = 16

SECONDS = 10  # between two lines of progress


def sample_to_folder(
    use: ModelUse, texts: Sequence[str] | None, *, prompts_file: str | None, out: Path, seed: int
) -> list[dict[str, Any]]:
    """Sample every prompt once, prompt i from seed + i; returns the manifest's lines.

    Raises:
        InputError: there is no such model, adapter, prompt file or option, or `out` holds samples already.
    """
    rows = asked(texts, prompts_file, seed)
    check_folder(out)
    sampler = KINDS[kind_of(use.path)].sampling.sampler(use, rows)
    out.mkdir(parents=True, exist_ok=True)
    lines = []
    with (out / "manifest.jsonl").open("w") as manifest:
        for part in batches(sampler.rows, BATCH):
            for row, sample in zip(part, sampler.generate(part), strict=True):
                file = save_sample(sample, out / f"{len(lines):04d}", sampler.sampling_rate, sampler.frame_rate)
                lines.append(line_of(file, row, sampler.word))
                manifest.write(json.dumps(lines[-1]) + "\n")
    return lines


def asked(texts: Sequence[str] | None, prompts_file: str | None, seed: int) -> list[Row]:
    """Return the rows to sample: texts, or the prompts of a file or a built-in set, prompt i with seed + i.

    Raises:
        InputError: there is no such file, or a text has characters that cannot be encoded.
    """
    tables.check_plain(list(texts or []), "--prompt")
    chosen = [Prompt(text) for text in texts] if texts else prompts.load(prompts_file, "--prompts")
    return [Row(prompt.text, seed + i, prompt.columns) for i, prompt in enumerate(chosen)]


def batches(rows: Sequence[Row], size: int) -> Iterator[Sequence[Row]]:
    """Yield rows in batches; where they take long, print now and then to stderr how many are done."""
    said, done = time.monotonic(), 0
    for part in batched(rows, size):
        yield part
        done += len(part)
        if time.monotonic() - said >= SECONDS:
            print(f"{done} of {len(rows)} samples", file=sys.stderr)
            said = time.monotonic()


def line_of(file: Path, row: Row, sampler: str) -> dict[str, Any]:
    """The manifest's line of a sample, with the columns of its prompt after its own keys, which win over equal names."""
    line = manifest_line(file.name, Sample(0, row, {}, None), 0, sampler)
    return line | row.columns | line


def check_folder(out: Path) -> None:
    """Refuse a folder that holds samples, or cannot be written to.

    Raises:
        InputError: the folder has a manifest, or files cannot be written to it.
    """
    if (out / "manifest.jsonl").exists():
        raise InputError(f"--out {out}: holds samples already (manifest.jsonl), choose another folder")
    folders.check_writable(out, "--out")
