"""Train on a reward learnt from votes, and on the true reward that cast them: how much of the gain do votes recover?

    python research/compare_votes.py OUT --votes 40 --seeds 0 1

The embedded model draws several pictures of each of many training prompts. `shapes` votes on them in place of a person,
through the same ballot as `flowgrpo vote`: the larger reward wins, and equal rewards are a vote for neither. Then the
model is trained on `votes`, and on `shapes` itself. Both runs use configs/shapes.yaml with the overrides `SETTINGS`,
through the command line, with one thread. The true reward is that of held-out prompts. Complete runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from flowgrpo.commands.inspect.vote import Ballot, pairs_of
from flowgrpo.data.prompts import load
from rewards.files.media import picture
from rewards.shapes import shapes

CONFIG = Path(__file__).parents[1] / "configs" / "shapes.yaml"
PROMPTS, SAMPLES = 40, 4  # prompts that are voted on, and pictures of each
TRUE = "reward/truth/mean"
SETTINGS = (
    "train.iterations=24",
    "train.learning_rate=1e-4",
    "train.schedule=constant",
    "train.ema={decay: 0.9, warmup: 10}",
    "eval.every=12",
    "eval.save=0",
    "run.processes=1",
    "run.trees=null",
    "eval_rewards=[{use: shapes, name: truth}]",
)


def command(*arguments: str | Path) -> None:
    """Run a command of flowgrpo; raise CalledProcessError if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "flowgrpo", *map(str, arguments)], env=environment, check=True)


def sampled(folder: Path) -> Path:
    """Sample pictures to vote on, unless they exist, and return their folder."""
    if not (folder / "manifest.jsonl").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        prompts = folder.with_suffix(".txt")
        chosen = [prompt.text for prompt in load("shapes:train")[:PROMPTS] for _ in range(SAMPLES)]
        prompts.write_text("".join(f"{prompt}\n" for prompt in chosen))
        command("sample", "shapes", "--prompts", prompts, "--out", folder)
    return folder


def voted(folder: Path, file: Path, votes: int) -> list[str]:
    """Vote until the file has `votes` votes, and return them."""
    ballot = Ballot(pairs_of([folder]), file)
    while ballot.told["votes"] < votes:
        pair = ballot.pairs[ballot.told["pair"]]
        first, second = (_truth(file, pair.prompt) for file in (pair.a, pair.b))
        ballot.vote(ballot.told["pair"], "neither" if first == second else "a" if first > second else "b")
    return [json.loads(line)["vote"] for line in file.read_text().splitlines()]


def _truth(file: Path, prompt: str) -> float:
    pixels = torch.frombuffer(bytearray(picture(file).tobytes()), dtype=torch.uint8).float() / 255
    return shapes(pixels.reshape(1, *picture(file).size[::-1], 3).movedim(-1, 1), [prompt])[0]


def trained(folder: Path, reward: str) -> tuple[float, float]:
    """Train on a reward, given as YAML; return the true held-out reward before and after."""
    if not (folder / "gallery.html").is_file():
        seed = f"run.seed={folder.name.rpartition('-')[2]}"
        place = [f"run.dir={folder.parent}", f"run.name={folder.name}", seed]
        command("train", CONFIG, f"rewards=[{reward}]", *place, *SETTINGS)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seen = [line[TRUE] for line in lines if line["phase"] == "eval"]
    return seen[0], seen[-1]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--votes", type=int, default=40)
    parser.add_argument("--of", default="shapes", help="the reward over whose features votes are learned")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    asked = parser.parse_args()
    file = (asked.out / f"votes-{asked.votes}.jsonl").resolve()
    choices = voted(sampled(asked.out / "pictures"), file, asked.votes)
    print(f"{len(choices)} votes, {choices.count('neither')} of them for neither")
    rewards = {"shapes": "{use: shapes}", "votes": f"{{use: votes, options: {{file: {file}, of: {asked.of}}}}}"}
    print("| trained on | seed | before | after | gain |\n|---|---|---|---|---|")
    gains: dict[str, list[float]] = {name: [] for name in rewards}
    for seed in asked.seeds:
        for name, reward in rewards.items():
            label = name if name == "shapes" else f"{name}-{asked.votes}"
            before, after = trained(asked.out / f"{label}-{seed}", reward)
            gains[name].append(after - before)
            print(f"| {name} | {seed} | {before:.3f} | {after:.3f} | {after - before:+.3f} |", flush=True)
    print(f"recovered: {sum(gains['votes']) / sum(gains['shapes']):.2f} of the gain")


if __name__ == "__main__":
    main()
