"""Train on prompts that are hardly ever won, with and without hints: how many of them begin to teach?

    python research/compare_hints.py OUT --seeds 0 1 --hints none winner search data

The prompts name a colour and a shape that the embedded model `shapes` has never seen together. A sample succeeds if it
shows its whole caption; the reward is 1 or 0. Good samples of `data` are pictures that we draw, two of each prompt. Each run
is a command line of flowgrpo on one thread. The prompts are sampled 16 times each by ODE, before and after. Complete
runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from flowgrpo.data.generators import scenes
from rewards.shapes import shapes

PROMPTS, PICTURES, SAMPLES = 12, 2, 16
SETTINGS = (
    "model={path: shapes, lora: null}",
    f"rewards=[{{use: {Path(__file__).resolve()}:solved}}]",
    "train={groups: 6, group_size: 8, updates: 1, micro_batch: 32, learning_rate: 2e-4, ema: null}",
    f"eval={{every: 1000, prompts: {PROMPTS * SAMPLES}, save: {PROMPTS * SAMPLES}}}",
    "run.trees=null",
    "run.patience=null",
    "run.resume=auto",
)


def solved(images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    """Return 1 for each picture that shows its whole caption, else 0."""
    return (torch.as_tensor(shapes(images, prompts)) > 0.99).float()


def write_prompts(folder: Path) -> None:
    """Write the prompts with the names of their pictures, for training, and without them, for evaluation."""
    unseen = [caption for caption in scenes.every_caption() if scenes.names_unseen(caption)]
    chosen, random = unseen[:: len(unseen) // PROMPTS][:PROMPTS], np.random.default_rng(0)
    lines = []
    for number, caption in enumerate(chosen):
        names = [f"{number}-{i}.png" for i in range(PICTURES)]
        for name in names:
            pixels = scenes.draw(scenes.arrange(caption, random))
            Image.fromarray((255 * pixels.transpose(1, 2, 0)).round().astype(np.uint8)).save(folder / name)
        lines.append(json.dumps({"prompt": caption, "picture": names}) + "\n")
    (folder / "train.jsonl").write_text("".join(lines))
    (folder / "eval.txt").write_text("".join(f"{caption}\n" for caption in chosen for _ in range(SAMPLES)))


def train(out: Path, source: str, seed: int, *, iterations: int, extra: Sequence[str]) -> Path:
    """Train one run, unless it is complete; return its folder."""
    folder = out / f"{source}-{seed}"
    if (folder / "metrics.jsonl").is_file() and f'"step": {iterations}, "phase": "eval"' in (
        folder / "metrics.jsonl"
    ).read_text():
        return folder
    hints = "{name: none}" if source == "none" else f"{{name: noised, source: {source}}}"
    axes = f"preset: flow_grpo, objective: {{kl: {{beta: 0}}}}, tree: {{train_fraction: 0.5}}, hints: {hints}"
    written = [f"algorithm={{{axes}}}", f"prompts={{train: {out}/train.jsonl, eval: {out}/eval.txt}}"]
    run = [f"train.iterations={iterations}", f"run.dir={out}", f"run.name={folder.name}", f"run.seed={seed}"]
    config = out / "config.yaml"
    config.write_text("{}\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "flowgrpo", "train", str(config), *SETTINGS, *written, *run, *extra]
    subprocess.run(command, env=environment, check=True)
    return folder


def read(folder: Path) -> dict[str, float]:
    """Return what a run came to: prompts that teach, prompts that are won and the success rate, before and after."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["phase"] == "train"]
    won: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for line in (folder / "samples" / "manifest.jsonl").read_text().splitlines():
        sample = json.loads(line)
        won[sample["step"]][sample["prompt"]] += sample["rewards"]["solved"]
    before, after = won[min(won)], won[max(won)]
    return {
        "groups that teach": sum(line["groups/teaching"] for line in trained) / len(trained),
        "prompts won before": sum(count > 0 for count in before.values()),
        "prompts won after": sum(count > 0 for count in after.values()),
        "success before": sum(before.values()) / (PROMPTS * SAMPLES),
        "success after": sum(after.values()) / (PROMPTS * SAMPLES),
        "evaluations": sum(line["cost/model_evaluations"] for line in trained),
    }


def main() -> None:
    """Run and print a line of each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--hints", nargs="+", default=["none", "data"], choices=["none", "data", "winner", "search"])
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--set", nargs="*", default=[], help="further overrides, key=value")
    asked = parser.parse_args()
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    write_prompts(out)
    for seed in asked.seeds:
        for source in asked.hints:
            found = read(train(out, source, seed, iterations=asked.iterations, extra=asked.set))
            told = ", ".join(f"{name} {value:.3g}" for name, value in found.items())
            print(f"{source} seed {seed}: {told}", flush=True)


if __name__ == "__main__":
    main()
