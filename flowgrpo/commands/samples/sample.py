"""Samples of prompts by a model, written to a folder with a manifest."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flowgrpo.commands.kinds import KINDS, kind_of
from flowgrpo.data import prompts, tables
from flowgrpo.data.prompts import Prompt, Row
from flowgrpo.errors import InputError
from flowgrpo.training.reports.progress import shown
from flowgrpo.training.reports.samples import ModelUse, Sample, Switches, manifest_line, save_sample
from flowgrpo.training.run import run_folder
from flowgrpo.training.run.phases import phase
from samplers.batches import batched


def sample_to_folder(use: ModelUse, rows: Sequence[Row], out: Path, batch_size: int) -> list[dict[str, Any]]:
    """Sample every row once, `batch_size` in one call; returns the manifest's lines.

    Raises:
        InputError: there is no such model, adapter or option, or `out` holds samples already.
    """
    check_folder(out)
    with shown(), phase("loading"):
        sampler = KINDS[kind_of(use.path)].sampling.sampler(use, rows)
    out.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = []
    with (out / "manifest.jsonl").open("w") as manifest, shown(), phase("sampling", len(rows)) as sampling:
        for part in batched(sampler.rows, batch_size):
            for row, sample in zip(part, sampler.generate(part), strict=True):
                file = save_sample(sample, out / f"{len(lines):04d}", sampler.sampling_rate, sampler.frame_rate)
                lines.append(line_of(file, row, sampler.word))
                manifest.write(json.dumps(lines[-1]) + "\n")
            sampling.advance(len(part))
    return lines


def asked(texts: Sequence[str] | None, prompts_file: str | None, seed: int, column: str = "prompt") -> list[Row]:
    """Return the rows to sample: texts, or the prompts of a file or a built-in set, prompt i with seed + i.

    Args:
        column: the one of a table or of a hub dataset that holds the prompts.

    Raises:
        InputError: there is no such file, or a text has characters that cannot be encoded.
    """
    if texts and column != "prompt":
        raise InputError("--column: it is one of the file that --prompts names, there is none")
    tables.check_plain(list(texts or []), "--prompt")
    if texts:
        chosen = [Prompt(text) for text in texts]
    else:
        assert prompts_file is not None
        chosen = prompts.load(prompts_file, "--prompts", column=column)
    return [Row(prompt.text, seed + i, prompt.columns) for i, prompt in enumerate(chosen)]


@contextmanager
def as_options() -> Iterator[None]:
    """Name keys of a model in errors as the options of the command that stand for them."""
    try:
        yield
    except InputError as error:
        names = "|".join(("variant", *vars(Switches())))
        said = re.sub(rf"\bmodel\.({names})\b", lambda found: f"--{found[1].replace('_', '-')}", str(error))
        raise InputError(said) from error


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
    run_folder.check_writable(out, "--out")
