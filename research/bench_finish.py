"""Measure cheap finishes on the embedded model: CPU seconds, evaluations, and how well they keep the order of siblings.

    python research/bench_finish.py [--preset tempflow] [--iterations 6] [--gain 0] [--seeds 2]

Prints a table in Markdown, and writes JSON with --json FILE. All forms take turns in one process on one thread. Seconds
and ratios are medians, with the quartiles of the ratios to the exact finish of the same turn. The rank agreement is the
mean of `finish/rank_agreement` over further iterations, in which the first group is finished exactly as well; the
seconds are without these. With --gain N each form also trains for N iterations, and the gain in held-out reward is
printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import paired
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from flowgrpo import config
from flowgrpo.commands.runs.train import train_config
from flowgrpo.data import prompts, stored
from flowgrpo.flow import setup
from flowgrpo.flow.config import Config
from flowgrpo.flow.rollouts.prompt_encoding import build_rows, longest_and_shortest
from flowgrpo.training.loop import Loop
from flowgrpo.training.run.run_data import RunData
from flowgrpo.training.scoring import scorer

FORMS: dict[str, dict[str, Any] | None] = {
    "exact": None,
    "4 steps": {"steps": 4},
    "3 steps": {"steps": 3},
    "2 steps": {"steps": 2},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "int8"},
}
TREES = {"tempflow": {}, "tempflow_fast": {}, "dense_grpo": {}}


def settings(preset: str, finish: dict[str, Any] | None, folder: str, **train: Any) -> Config:
    """Return the configuration of a run of `shapes` with one form of finish."""
    whole = None if finish is None else {"steps": None, **finish}  # replaces the preset's finish
    algorithm: dict[str, Any] = {"preset": preset, "tree": {"finish": whole}}
    if preset == "dense_grpo":
        algorithm["kernel"] = {"calibrate": None}
    written = {
        "model": {"path": "shapes", "lora": None},
        "prompts": {"train": "shapes:train", "eval": "shapes:eval"},
        "rewards": [{"use": "shapes"}],
        "algorithm": algorithm,
        "train": {"groups": 2, "group_size": 24, "micro_batch": 32, "learning_rate": 2e-4, "updates": 1, **train},
        "eval": {"every": 1000, "prompts": 256, "save": 0},
        "run": {"name": "bench", "dir": folder, "checkpoint": {"every": 1000}},
    }
    return config.validate(written)


def trainer(chosen: Any, stack: ExitStack) -> Loop:
    """Return the training loop of a run before its first iteration."""
    rewards, _ = scorer.rewards(chosen.rewards, [])
    data = RunData(stored.train_prompts(chosen), prompts.load_split(chosen.prompts, "eval")[:1], rewards, [])
    chosen.run.folder.mkdir(parents=True, exist_ok=True)
    made = setup.trainer(chosen, Accelerator(cpu=True), data)
    stack.enter_context(made.policy.call_overrides(**made.training_call))
    made.policy.start(build_rows(longest_and_shortest(made.train_prompts)[:1]))
    return made


def iterate(run: Loop) -> dict[str, Any]:
    """Run one iteration and return its metrics, with its CPU seconds."""
    started = time.process_time()
    line = run.iterate()
    run.state.done += 1
    return line | {"seconds": time.process_time() - started}


def with_check(finish: dict[str, Any] | None, check: int) -> dict[str, Any] | None:
    """Return a form that is compared with exact finishes every `check` iterations (0: never)."""
    return None if finish is None else finish | {"check": check}


def gained(preset: str, finish: dict[str, Any] | None, iterations: int, seed: int, folder: str) -> float:
    """Train a run and return the gain in held-out reward."""
    chosen = settings(preset, with_check(finish, 0), folder, iterations=iterations)
    chosen = chosen.model_copy(update={"run": chosen.run.model_copy(update={"seed": seed, "name": f"gain-{seed}"})})
    held_out = [line["reward/mean"] for line in train_config(chosen).metrics if line["phase"] == "eval"]
    return held_out[-1] - held_out[0]


def main() -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--preset", default="tempflow", choices=TREES)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=FORMS)
    parser.add_argument("--gain", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    set_seed(0)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        forms = {form: FORMS[form] for form in dict.fromkeys(["exact", *args.forms])}
        place = Path(folder)
        runs, checked = (
            {
                form: trainer(settings(args.preset, with_check(finish, check), str(place / f"{form}-{check}")), stack)
                for form, finish in forms.items()
                if check == 0 or finish is not None
            }
            for check in (0, 1)
        )
        lines: dict[str, list[dict[str, Any]]] = {form: [] for form in forms}
        for turn in range(args.iterations + 1):
            for form, run in runs.items():
                line = iterate(run)
                lines[form] += [line] if turn else []  # the first one warms up
        for form in forms:
            taken, exact = ([line["seconds"] for line in lines[each]] for each in (form, "exact"))
            agreement = [
                iterate(checked[form])["finish/rank_agreement"] for _ in range(args.iterations) if form in checked
            ]
            found[form] = {
                "seconds": statistics.median(taken),
                "ratio": paired.paired(taken, exact),
                "evaluations": lines[form][0]["cost/rollout_evaluations"],
                "rank_agreement": statistics.mean(agreement) if agreement else 1.0,
            }
            if args.gain:
                found[form]["gain"] = [
                    gained(args.preset, forms[form], args.gain, seed, str(place / "gain" / form))
                    for seed in range(args.seeds)
                ]
    head = [
        "finish",
        "CPU s",
        "of exact",
        "rollout evaluations",
        "rank agreement",
        *["gain"] * bool(args.gain),
    ]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for form, each in found.items():
        ratio = "{median:.2f} ({low:.2f} to {high:.2f})".format(**each["ratio"])
        cells = [form, f"{each['seconds']:.2f}", ratio, f"{each['evaluations']:,}"]
        cells.append(f"{each['rank_agreement']:.2f}")
        cells += [" and ".join(f"{gain:.3f}" for gain in each["gain"])] if args.gain else []
        print("| " + " | ".join(cells) + " |")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
