"""Samples of evaluations, their files and manifest, and models that are ready to sample."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.schema.sections import RewardUse
from flowgrpo.training.reports import video_files
from flowgrpo.training.run.run_files import read_manifest
from flowgrpo.training.run.run_folder import replace_text
from rewards.audio import Films, tensors

FRAME_RATE = 8.0  # default, frames per second
SAMPLING_RATE = 44100  # default, Hz
COMPARE_AT = (0.25, 0.5, 0.75)  # default, fractions of the steps at which a search compares candidates


@dataclass(frozen=True)
class Text:
    """A generated text: its tokens, and for each the decoding step that committed it, or -1 if the token was given."""

    text: str
    tokens: list[str]
    steps: list[int]


@dataclass(frozen=True)
class Sample:
    """A held-out sample with its rewards."""

    index: int  # index of the prompt
    row: Row
    rewards: dict[str, float | None]  # by name; None if the reward does not apply or was lost
    decoded: torch.Tensor | Films | Text | None  # None if the sample is not saved


def unscored(rows: Sequence[Row], decoded: Sequence[Any]) -> list[Sample]:
    """Return the samples of rows without rewards."""
    return [Sample(index, row, {}, each) for index, (row, each) in enumerate(zip(rows, decoded, strict=True))]


def is_finite(decoded: torch.Tensor | Films | Text) -> bool:
    """Return whether all values of a decoded sample are finite."""
    return isinstance(decoded, Text) or all(bool(part.isfinite().all()) for part in tensors(decoded))


class SampleFolder:
    """The folder of a run's samples: files in `samples/step-000010/` and so on, listed in `manifest.jsonl`."""

    def __init__(self, run: Path, frame_rate: float = FRAME_RATE):
        self.frame_rate = frame_rate
        self.folder = run / "samples"
        self.manifest = self.folder / "manifest.jsonl"

    def write(self, samples: Sequence[Sample], step: int) -> None:
        """Save the samples that have `decoded`. The prompt's column `sampling_rate` sets the rate of audio in Hz."""
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
        """Drop the manifest lines of steps after `step`."""
        kept = [line for line in read_manifest(self.folder) if line.get("step", 0) <= step]
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_text(self.manifest, "".join(json.dumps(line) + "\n" for line in kept))


def manifest_line(file: str, sample: Sample, step: int, sampler: str = "ode") -> dict[str, Any]:
    """Return one line of a manifest."""
    row = {"file": file, "prompt": sample.row.prompt, "seed": sample.row.seed}
    return row | {"step": step, "sampler": sampler, "rewards": sample.rewards}


def save_sample(
    sample: torch.Tensor | Films | Text, stem: Path, sampling_rate: int = SAMPLING_RATE, frame_rate: float = FRAME_RATE
) -> Path:
    """Write one sample to a file named `stem` plus a suffix, and return the file.

     - image (3, H, W) in [0, 1]: .png
     - video (F, 3, H, W) in [0, 1], or `Films`: .mp4; without ffmpeg a looping .webp of quality 90, which merges equal
       frames and has no sound
     - audio (C, N) in [-1, 1]: 16-bit .wav
     - text: .json

    Raises ValueError for another shape, InputError if values are not finite, OSError if the file cannot be written.
    """
    if not is_finite(sample):
        raise InputError(
            f"{stem.name}: the model's sample is not finite, so there is nothing to keep; try the dtype float32 or bfloat16"
        )
    if isinstance(sample, Text):
        file = _with_suffix(stem, ".json")
        file.write_text(json.dumps(asdict(sample), ensure_ascii=False) + "\n", encoding="utf-8")
        return file
    sample, *sounds = tensors(sample)
    if sample.ndim == 2:
        file = _with_suffix(stem, ".wav")
        _write_wav(sample, file, sampling_rate)
        return file
    if sample.ndim not in (3, 4) or sample.shape[-3] != 3:
        raise ValueError(f"a sample of shape {tuple(sample.shape)} is neither an image nor a video nor audio")
    pixels = sample.mul(255).round().clamp(0, 255).byte().movedim(-3, -1).cpu().numpy()
    if sample.ndim == 3:
        file = _with_suffix(stem, ".png")
        Image.fromarray(pixels).save(file)
        return file
    if (program := video_files.ffmpeg()) is not None:
        file = _with_suffix(stem, ".mp4")
        with tempfile.TemporaryDirectory() as folder:
            heard = Path(folder) / "sound.wav"
            for sound in sounds:
                _write_wav(sound, heard, sampling_rate)
            video_files.write_mp4(program, pixels, file, frame_rate, soundtrack=heard if sounds else None)
        return file
    video_files.say_once_that_there_is_no_ffmpeg()
    file = _with_suffix(stem, ".webp")
    first, *others = [Image.fromarray(frame) for frame in pixels]
    milliseconds = round(1000 / frame_rate)
    first.save(file, save_all=True, append_images=others, duration=milliseconds, loop=0, quality=90)
    return file


def _write_wav(sound: torch.Tensor, file: Path, sampling_rate: int) -> None:
    from scipy.io import wavfile  # imported here, for it takes a tenth of a second

    wavfile.write(file, sampling_rate, sound.clamp(-1, 1).mul(32767).round().short().T.cpu().numpy())


def _with_suffix(stem: Path, suffix: str) -> Path:
    return stem.with_name(stem.name + suffix)


@dataclass(frozen=True)
class Switches:
    """Memory and speed options of a pipeline, with the same names as in config section `model`."""

    text_encoders: str = "offload"
    vae: str = "keep"
    vae_tiling: bool = False
    _: KW_ONLY
    attention: str | None = None
    compile: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelUse:
    """Options of the model that `flowgrpo sample` uses."""

    path: str  # a built-in name, a local folder or a hub id
    # Arguments of the pipeline's call; of a language model see `flowgrpo.mdlm.outputs.sampling.OPTIONS`.
    call: dict[str, Any]
    adapter: str | dict[str, str] | None = None  # a LoRA, as in `model.lora.path`
    dtype: str = "float32"  # `float32`, `bfloat16` or `float16`
    quantise: str | None = None  # as `model.quantise`
    variant: str | None = None  # as `model.variant`
    # Start and end of the steps with the adapter, as fractions of the schedule; None for all steps.
    adapter_steps: list[float] | None = None
    switches: Switches = Switches()  # for pipelines only


@dataclass(frozen=True, kw_only=True)
class SearchUse:
    """Options of a search at sampling time; see `flowgrpo.flow.rollouts.search`."""

    name: str  # `best-of-n`, `beam` or `smc`
    width: int  # candidates of a prompt
    rewards: Sequence[RewardUse]
    keep: int = 1  # candidates that stay at a comparison of `beam`
    level: float = 0.0  # noise level of the stochastic steps
    compare_at: Sequence[float] = ()  # when candidates are compared, as fractions of the steps
    temperature: float | None = None  # of `smc`, None for the others: weights are exp(reward / temperature)

    @property
    def line(self) -> dict[str, Any]:
        """Return what a line of the manifest says of the search: its options, without those that it does not have."""
        found: dict[str, Any] = {"name": self.name, "width": self.width}
        if self.name == "beam":
            found["keep"] = self.keep
        if self.name != "best-of-n":
            found |= {"level": self.level, "compare_at": list(self.compare_at)}
        if self.temperature is not None:
            found["temperature"] = self.temperature
        rewards = [use.model_dump(exclude_defaults=True) for use in self.rewards]
        return found | {"rewards": rewards}


@dataclass(frozen=True)
class Sampler:
    """A model that is ready to sample."""

    rows: Sequence[Row]  # prompts and seeds
    generate: Callable[[Sequence[Row]], Sequence[Sample]]  # samples the given rows, some of `rows`
    word: str  # name of the sampler in the manifest
    _: KW_ONLY
    search: SearchUse | None = None  # the search that chooses samples; None if each is the only one of its row
    sampling_rate: int = SAMPLING_RATE  # Hz
    frame_rate: float = FRAME_RATE  # frames per second
