"""Samples that a notebook shows."""

from __future__ import annotations

import html
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowgrpo.commands.page_parts.media import data_url
from flowgrpo.training.reports.samples import Sample, Text, save_sample
from rewards.files import suffixes


class Samples(list[Any]):
    """A list of samples: images (3, H, W) or videos (F, 3, H, W) in [0, 1], `Films`, sounds (C, N) in [-1, 1], or texts.

    A notebook shows them with their `prompts`.
    """

    def __init__(self, samples: Sequence[Sample], sampling_rate: int, frame_rate: float):
        decoded = [sample.decoded for sample in samples]
        super().__init__(each.text if isinstance(each, Text) else each for each in decoded)
        self.prompts = [sample.row.prompt for sample in samples]
        self._decoded, self._rates = decoded, (sampling_rate, frame_rate)

    def save(self, folder: str | Path) -> list[Path]:
        """Write each sample to a file in a folder, and return the files; see `save_sample` for their formats."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        named = ((each, place / f"{i:04d}") for i, each in enumerate(self._decoded) if each is not None)
        return [save_sample(each, stem, *self._rates) for each, stem in named]

    def _repr_html_(self) -> str:
        """Return what a notebook shows: each sample above its prompt."""
        with tempfile.TemporaryDirectory() as folder:
            figures = [_figure(*each) for each in zip(self.prompts, self, self.save(folder), strict=True)]
        return "".join(figures)


def _figure(prompt: str, sample: Any, file: Path) -> str:
    words, suffix = html.escape(prompt), suffixes.suffix_of(file)
    if isinstance(sample, str):
        shown = f"<pre>{html.escape(sample)}</pre>"
    elif suffix in suffixes.SOUNDS:
        shown = f'<audio controls src="{data_url(file)}"></audio>'
    elif suffix in suffixes.FILMS:
        shown = f'<video controls loop src="{data_url(file)}"></video>'
    else:
        shown = f'<img alt="{words}" src="{data_url(file)}">'
    return f'<figure style="display: inline-block">{shown}<figcaption>{words}</figcaption></figure>'
