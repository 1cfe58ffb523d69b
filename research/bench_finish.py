"""Measure cheap finishes on the embedded model: CPU seconds of a rollout, evaluations, and what they do to rewards.

    python research/bench_finish.py [--preset tempflow] [--iterations 6] [--forms int8 ...] [--gain 0] [--seeds 2]
    python research/bench_finish.py --layer 1024 3072 12288        # one linear layer in each precision

Prints a table in Markdown, and writes JSON with --json FILE. All forms take turns in one process on one thread, each with
rollouts of one group of 24. Seconds and ratios are medians, with the quartiles of the ratios to the exact finish of the
same turn. Drift and rank agreement are the means of `finish/reward_drift` and `finish/rank_agreement` over rollouts of
other prompts, which are finished exactly as well; the seconds are without these. With --gain N each form also trains for
N iterations of two groups, and the gain in held-out reward is printed.

--layer ROWS INPUTS OUTPUTS measures a random layer of float32 weights and its copies on random rows, with the root mean
square of the copies' errors over that of the product.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
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
from flowgrpo.flow.rollouts.cheap_finishes import agreement
from flowgrpo.flow.rollouts.prompt_encoding import build_rows, longest_and_shortest
from flowgrpo.training.loop import Loop
from flowgrpo.training.run.run_data import RunData
from flowgrpo.training.scoring import scorer
from flowgrpo.training.weights.low_precision_layers import EightBitLinear, HalfLinear

FORMS: dict[str, dict[str, Any] | None] = {
    "exact": None,
    "4 steps": {"steps": 4},
    "3 steps": {"steps": 3},
    "2 steps": {"steps": 2},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "int8"},
    "fp8": {"dtype": "fp8"},
}
TREES = ("tempflow", "tempflow_fast", "dense_grpo")


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
    policy = made.wing.policy
    stack.enter_context(policy.call_overrides(**made.wing.training_call))
    policy.start(build_rows(longest_and_shortest(made.state.train_prompts)[:1]))
    return made


def with_check(finish: dict[str, Any] | None, check: int) -> dict[str, Any] | None:
    """Return a form that is compared with exact finishes every `check` iterations (0: never)."""
    return None if finish is None else finish | {"check": check}


def gained(preset: str, finish: dict[str, Any] | None, iterations: int, seed: int, folder: str) -> float:
    """Train a run and return the gain in held-out reward."""
    chosen = settings(preset, with_check(finish, 0), folder, iterations=iterations)
    chosen = chosen.model_copy(update={"run": chosen.run.model_copy(update={"seed": seed, "name": f"gain-{seed}"})})
    held_out = [line["reward/mean"] for line in train_config(chosen).metrics if line["phase"] == "eval"]
    return held_out[-1] - held_out[0]


def finishes(
    preset: str, forms: Mapping[str, dict[str, Any] | None], rollouts: int, folder: Path
) -> dict[str, dict[str, Any]]:
    """Return by form `seconds` of a rollout, their `ratio` to the exact one's, `evaluations`, `agreement` and `drift`."""
    with ExitStack() as stack:
        place = str(folder / "runs")
        runs = {
            form: trainer(settings(preset, with_check(each, 0), place, groups=1), stack) for form, each in forms.items()
        }
        evaluations: dict[str, int] = {}

        def roll_out(form: str) -> None:
            run = runs[form]
            before = run.wing.policy.evaluations
            run.wing.rollout(0, run.state.groups(0))
            evaluations[form] = run.wing.policy.evaluations - before

        taken = paired.in_turns({form: partial(roll_out, form) for form in forms}, rollouts, paired.cpu)
        found: dict[str, dict[str, Any]] = {}
        for form, finish in forms.items():
            measured = {"finish/rank_agreement": 1.0, "finish/reward_drift": 0.0}
            if finish is not None:
                run = trainer(settings(preset, with_check(finish, 1), place, groups=1), stack)
                batches = [run.wing.rollout(i, run.state.groups(i)) for i in range(rollouts)]
                each = [agreement(batch.finished.pairs) for batch in batches]
                measured = {key: statistics.mean(values[key] for values in each) for key in measured}
            found[form] = {
                "seconds": statistics.median(taken[form]),
                "ratio": paired.paired(taken[form], taken["exact"]),
                "evaluations": evaluations[form],
                "agreement": measured["finish/rank_agreement"],
                "drift": measured["finish/reward_drift"],
            }
    return found


@torch.no_grad()
def layers(rows: int, inputs: int, outputs: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Return by precision `seconds` of a linear layer's product, their `ratio` to float32's, and the product's `error`."""
    linear, x = torch.nn.Linear(inputs, outputs, bias=False), torch.randn(rows, inputs)
    forms: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"float32": linear, "bfloat16": HalfLinear(linear)}
    forms |= {word: EightBitLinear(linear, word) for word in ("int8", "fp8")}
    taken = paired.in_turns({form: partial(layer, x) for form, layer in forms.items()}, rounds, paired.cpu)
    exact = linear(x)
    return {
        form: {
            "seconds": statistics.median(taken[form]),
            "ratio": paired.paired(taken[form], taken["float32"]),
            "error": float((layer(x) - exact).norm() / exact.norm()),
        }
        for form, layer in forms.items()
    }


def tell(first: str, found: Mapping[str, Mapping[str, Any]], columns: Mapping[str, str]) -> None:
    """Print measurements as a table in Markdown: seconds, ratio, and further columns by their head and format."""
    head = [first, "CPU s", "ratio", *columns]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for form, each in found.items():
        ratio = "{median:.2f} ({low:.2f} to {high:.2f})".format(**each["ratio"])
        cells = [form, f"{each['seconds']:.3g}", ratio]
        print("| " + " | ".join([*cells, *(format(each[key], style) for key, style in columns.items())]) + " |")


def main() -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--preset", default="tempflow", choices=TREES)
    parser.add_argument("--iterations", type=int, default=6, help="rollouts, or rounds of --layer")
    parser.add_argument("--forms", nargs="*", default=list(FORMS), choices=FORMS)
    parser.add_argument("--layer", nargs=3, type=int, metavar=("ROWS", "INPUTS", "OUTPUTS"))
    parser.add_argument("--gain", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    set_seed(0)
    if args.layer is not None:
        found = layers(*args.layer, args.iterations)
        tell("layer", found, {"error": ".2%"})
    else:
        forms = {form: FORMS[form] for form in dict.fromkeys(["exact", *args.forms])}
        with tempfile.TemporaryDirectory() as folder:
            found = finishes(args.preset, forms, args.iterations, Path(folder))
            tell("finish", found, {"evaluations": ",", "agreement": ".2f", "drift": ".3f"})
            if args.gain:
                for form, finish in forms.items():
                    place = str(Path(folder) / "gain" / form)
                    of_seed = [gained(args.preset, finish, args.gain, seed, place) for seed in range(args.seeds)]
                    found[form]["gain"] = of_seed
                    print(f"{form}: gain " + " and ".join(f"{gain:.3f}" for gain in of_seed))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
