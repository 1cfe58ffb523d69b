"""Sample prompts by a model into a folder with a manifest."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flowgrpo.commands.model_kinds import KINDS, detect_kind
from flowgrpo.data import prompts, tables
from flowgrpo.data.prompts import Prompt, Row
from flowgrpo.errors import InputError
from flowgrpo.training.reports.progress import open_display
from flowgrpo.training.reports.samples import ModelUse, Sampler, Switches, manifest_line, save_sample
from flowgrpo.training.run import run_folder
from flowgrpo.training.run.phases import phase
from samplers.batches import batched


def sample_to_folder(use: ModelUse, rows: Sequence[Row], out: Path, batch_size: int) -> list[dict[str, Any]]:
    """Sample every row once, `batch_size` in one call, and return the manifest's lines."""
    check_new(out)
    with open_display(), phase("loading"):
        sampler = KINDS[detect_kind(use.path)].sampling.sampler(use, rows)
    out.mkdir(parents=True, exist_ok=True)
    return write_samples(sampler, sampler.rows, out, batch_size)


def check_new(out: Path) -> None:
    """Raise InputError if a folder holds samples already, or cannot be written."""
    if (out / "manifest.jsonl").exists():
        raise InputError(f"--out {out}: holds samples already (manifest.jsonl), choose another folder")
    run_folder.check_writable(out, "--out")


def write_samples(
    sampler: Sampler, rows: Sequence[Row], out: Path, batch_size: int, *, done: int = 0
) -> list[dict[str, Any]]:
    """Sample some of a sampler's rows, `batch_size` in one call, append them to the manifest of `out`; return its new lines.

    `done` samples are in the folder already.
    """
    lines: list[dict[str, Any]] = []
    with (out / "manifest.jsonl").open("a") as manifest, open_display(), phase("sampling", len(rows)) as sampling:
        for part in batched(rows, batch_size):
            for row, sample in zip(part, sampler.generate(part), strict=True):
                stem = out / f"{done + len(lines):04d}"
                assert sample.decoded is not None
                file = save_sample(sample.decoded, stem, sampler.sampling_rate, sampler.frame_rate)
                line = manifest_line(file.name, sample, 0, sampler.word)
                if sampler.search is not None:
                    line["search"] = {
                        **sampler.search.line,
                        "seed": row.seed,
                    }  # of the prompt, line["seed"] of the start
                lines.append(line | sample.row.columns | line)  # a column does not replace a key of the manifest
                manifest.write(json.dumps(lines[-1]) + "\n")
            manifest.flush()
            sampling.advance(len(part))
    return lines


def choose_rows(texts: Sequence[str] | None, prompts_file: str | None, seed: int, column: str = "prompt") -> list[Row]:
    """Return the rows to sample, from `texts` or a column of a file or a built-in set; row i has the seed `seed` + i.

    Raises InputError if there is no such file, or a text cannot be encoded.
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
    """Name command-line options instead of keys such as `model.dtype` in an InputError."""
    options = {f"model.{name}": f"--{name.replace('_', '-')}" for name in ("variant", *vars(Switches()))}
    options["model.lora.path"] = "--adapter"
    try:
        yield
    except InputError as error:
        keys = "|".join(map(re.escape, options))
        raise InputError(re.sub(rf"\b({keys})\b", lambda key: options[key[1]], str(error))) from error
