"""Samples: a model that is ready to make them, and the files and the manifest that keep them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from scipy.io import wavfile

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.training.reports import video_files
from flowgrpo.training.run.run_files import read_manifest
from flowgrpo.training.run.run_folder import replace_text

FRAME_RATE = 8.0  # frames per second of a video, where nobody says
SAMPLING_RATE = 44100  # where nobody says


@dataclass(frozen=True)
class Text:
    """A generated text: its tokens, and the decoder's step that committed each, -1 for one that was given."""

    text: str
    tokens: list[str]
    steps: list[int]


@dataclass(frozen=True)
class Sample:
    """One evaluated sample: its index among the prompts, its rewards by name (None: not applicable or lost), itself."""

    index: int
    row: Row
    rewards: dict[str, float | None]
    decoded: torch.Tensor | Text | None


def is_finite(decoded: torch.Tensor | Text) -> bool:
    """Whether all that was decoded is a number, as all of a text is."""
    return not isinstance(decoded, torch.Tensor) or bool(decoded.isfinite().all())


class SampleFolder:
    """The samples that a run keeps: files in `samples/step-000010/`, and one line each in `manifest.jsonl`.

    Attributes:
        frame_rate: of videos, frames per second.
    """

    def __init__(self, run: Path):
        self.frame_rate = FRAME_RATE
        self.folder = run / "samples"
        self.manifest = self.folder / "manifest.jsonl"

    def write(self, samples: Sequence[Sample], step: int) -> None:
        """Save the samples that carry what was decoded; audio at the rate of its column `sampling_rate`."""
        self.folder.mkdir(exist_ok=True)
        lines = []
        for sample in samples:
            if sample.decoded is None:
                continue
            folder = self.folder / f"step-{step:06d}"
            folder.mkdir(exist_ok=True)
            rate = sample.row.columns.get("sampling_rate") or SAMPLING_RATE
            file = save_sample(sample.decoded, folder / f"{sample.index:04d}", rate, self.frame_rate)
            sampler = "decoder" if isinstance(sample.decoded, Text) else "ode"
            lines.append(manifest_line(str(file.relative_to(self.folder)), sample, step, sampler))
        with self.manifest.open("a") as manifest:
            manifest.writelines(json.dumps(line) + "\n" for line in lines)

    def forget_after(self, step: int) -> None:
        """Drop what was sampled after a checkpoint's step."""
        kept = [line for line in read_manifest(self.folder) if line.get("step", 0) <= step]
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_text(self.manifest, "".join(json.dumps(line) + "\n" for line in kept))


def manifest_line(file: str, sample: Sample, step: int, sampler: str = "ode") -> dict[str, Any]:
    """One line of a manifest."""
    return {
        "file": file,
        "prompt": sample.row.prompt,
        "seed": sample.row.seed,
        "step": step,
        "sampler": sampler,
        "rewards": sample.rewards,
    }


def save_sample(
    sample: torch.Tensor | Text, stem: Path, sampling_rate: int = SAMPLING_RATE, frame_rate: float = FRAME_RATE
) -> Path:
    """Write one sample as what it is.

    Args:
        sample: an image (3, H, W) or a video (F, 3, H, W), both in [0, 1], audio (C, N) in [-1, 1], or a text.
        stem: the file without its suffix.
        sampling_rate: of audio, samples per second.
        frame_rate: of a video, frames per second.

    Returns:
        the file: `.png`; `.mp4`, or where ffmpeg is not installed `.webp`, looping, of quality 90, where equal neighbours
            are one longer frame; `.wav` of 16 bit; `.json` with the fields of a `Text`.

    Raises:
        ValueError: the sample is something else.
        InputError: the sample has values that are not finite.
        OSError: the file cannot be written.
    """
    if not is_finite(sample):
        raise InputError(
            f"{stem.name}: the model's sample is not finite, so there is nothing to keep; try the dtype float32 or bfloat16"
        )
    if isinstance(sample, Text):
        file = stem.with_name(f"{stem.name}.json")
        file.write_text(json.dumps(asdict(sample), ensure_ascii=False) + "\n", encoding="utf-8")
        return file
    if sample.ndim == 2:
        file = stem.with_name(f"{stem.name}.wav")
        wavfile.write(file, sampling_rate, sample.clamp(-1, 1).mul(32767).round().short().T.cpu().numpy())
        return file
    if sample.ndim not in (3, 4) or sample.shape[-3] != 3:
        raise ValueError(f"a sample of shape {tuple(sample.shape)} is neither an image nor a video nor audio")
    pixels = sample.mul(255).round().clamp(0, 255).byte().movedim(-3, -1).cpu().numpy()
    if sample.ndim == 3:
        file = stem.with_name(f"{stem.name}.png")
        Image.fromarray(pixels).save(file)
        return file
    if (program := video_files.ffmpeg()) is not None:
        file = stem.with_name(f"{stem.name}.mp4")
        video_files.write_mp4(program, pixels, file, frame_rate)
        return file
    video_files.say_once_that_there_is_no_ffmpeg()
    file = stem.with_name(f"{stem.name}.webp")
    first, *others = [Image.fromarray(frame) for frame in pixels]
    milliseconds = round(1000 / frame_rate)
    first.save(file, save_all=True, append_images=others, duration=milliseconds, loop=0, quality=90)
    return file


@dataclass(frozen=True)
class Switches:
    """Switches of memory and speed of a pipeline, as the keys of the same names in a config's section `model`."""

    text_encoders: str = "offload"
    vae: str = "keep"
    vae_tiling: bool = False
    _: KW_ONLY
    attention: str | None = None
    compile: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelUse:
    """A model as `flowgrpo sample` is asked to use it.

    Attributes:
        path: a built-in name, a local folder or a hub id.
        call: arguments of the pipeline's call; of a language model those of `flowgrpo.mdlm.outputs.sampling.OPTIONS`.
        adapter: a LoRA, as `model.lora.path` takes it.
        dtype: `float32`, `bfloat16` or `float16`.
        quantise: the base as `model.quantise` keeps it.
        variant: of the files of weights, as `model.variant`.
        adapter_steps: first and end of the part of the schedule that the adapter acts on; None: all of it.
        switches: of memory and speed, which only pipelines have.
    """

    path: str
    call: dict[str, Any]
    adapter: str | dict[str, str] | None = None
    dtype: str = "float32"
    quantise: str | None = None
    variant: str | None = None
    adapter_steps: list[float] | None = None
    switches: Switches = Switches()


@dataclass(frozen=True)
class Sampler:
    """A model that is ready to sample.

    Attributes:
        rows: what is asked of it.
        generate: samples of some of the rows.
        word: the manifest's word for how it samples.
        sampling_rate: of sounds.
        frame_rate: of videos.
    """

    rows: Sequence[Row]
    generate: Callable[[Sequence[Row]], Sequence[Any]]
    word: str
    _: KW_ONLY
    sampling_rate: int = SAMPLING_RATE
    frame_rate: float = FRAME_RATE
