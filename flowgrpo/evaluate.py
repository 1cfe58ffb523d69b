"""Held-out evaluation: ODE samples of fixed prompts at fixed seeds, scored, and some of them kept as files."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image

from flowgrpo.policy import Policy, Row
from flowgrpo.prompts import Prompt
from flowgrpo.rollout import score
from rewards import Reward


@dataclass(frozen=True)
class Sample:
    """One evaluated sample: its place among the prompts, its rewards by name (None: not applicable or lost), its pixels."""

    index: int
    row: Row
    rewards: dict[str, float | None]
    image: torch.Tensor | None


def evaluate(
    policy: Policy,
    prompts: Sequence[Prompt],
    rewards: Sequence[Reward],
    micro_batch: int,
    accelerator: Accelerator,
    keep: int = 0,
) -> list[Sample]:
    """Sample and score every prompt once; prompt i always has seed i. The work is shared by the processes.

    Args:
        keep: the first so many samples come with their pixels, (3, H, W) in [0, 1] on the CPU.

    Returns:
        all samples, in the order of the prompts, on every process.
    """
    own = list(range(accelerator.process_index, len(prompts), accelerator.num_processes))
    samples = []
    for at in range(0, len(own), micro_batch):
        indices = own[at : at + micro_batch]
        rows = [Row(prompts[i].text, i, prompts[i].columns) for i in indices]
        images = policy.generate(rows)
        values = score(rewards, images, rows, one_group=False).values.tolist()
        for index, row, value, image in zip(indices, rows, values, images, strict=True):
            named = {r.name: None if v != v else v for r, v in zip(rewards, value, strict=True)}
            samples.append(Sample(index, row, named, image.cpu() if index < keep else None))
    return sorted(gather_object(samples), key=lambda sample: sample.index)


def weighted(sample: Sample, rewards: Sequence[Reward]) -> float | None:
    """The training reward of a sample: the weighted sum of the rewards that apply; None where none does."""
    values = [r.weight * v for r in rewards if (v := sample.rewards[r.name]) is not None]
    return sum(values) if values else None


class SampleFolder:
    """Kept samples of a run: images in `samples/step-000010/`, and one line each in `manifest.jsonl`."""

    def __init__(self, run: Path):
        self.folder = run / "samples"
        self.manifest = self.folder / "manifest.jsonl"

    def write(self, samples: Sequence[Sample], step: int) -> None:
        """Save the samples that carry pixels."""
        self.folder.mkdir(exist_ok=True)
        lines = []
        for sample in samples:
            if sample.image is None:
                continue
            file = Path(f"step-{step:06d}") / f"{sample.index:04d}.png"
            (self.folder / file).parent.mkdir(exist_ok=True)
            save_image(sample.image, self.folder / file)
            lines.append(manifest_line(str(file), sample, step))
        with self.manifest.open("a") as manifest:
            manifest.writelines(json.dumps(line) + "\n" for line in lines)

    def forget_after(self, step: int) -> None:
        """Drop what was sampled after a checkpoint's step."""
        kept = [line for line in read_manifest(self.folder) if line["step"] <= step]
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.manifest.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(partial, self.manifest)


def manifest_line(file: str, sample: Sample, step: int) -> dict[str, Any]:
    """One line of a manifest."""
    return {
        "file": file,
        "prompt": sample.row.prompt,
        "seed": sample.row.seed,
        "step": step,
        "sampler": "ode",
        "rewards": sample.rewards,
    }


def read_manifest(folder: Path) -> list[dict[str, Any]]:
    """The lines of a folder's manifest; none if it has none."""
    path = folder / "manifest.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()] if path.is_file() else []


def save_image(image: torch.Tensor, path: Path) -> None:
    """Write an image (3, H, W) in [0, 1] as PNG."""
    Image.fromarray(image.mul(255).round().clamp(0, 255).byte().permute(1, 2, 0).cpu().numpy()).save(path)
