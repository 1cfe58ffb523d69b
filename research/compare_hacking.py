"""Compare ways to combine planted proxies of a reward: when does the true reward fall? Writes a table.

    python research/compare_hacking.py run OUT --seeds 0 1 --iterations 32
    python research/compare_hacking.py report OUT --iterations 32

`run` trains the embedded model on the three proxies of research/planted_rewards.py, once for each seed and way: on their
mean, on their smallest (`worst`), on the mean minus their variance (`cautious`), or on the share of the group whose mean is
lower (`wins`, as Pref-GRPO compares pairs). It uses the command line, one thread per run, one run after another (--at-once
N: N at a time). The true reward, `shapes`, is watched on held-out prompts and never trained on. A seed fixes the prompts
for all ways alike. Complete runs are not repeated; a stopped run resumes from its last checkpoint. `report` reads the
metrics of the runs. It prints the true reward before training, at its best and at the end, the proxies' mean at the end,
and the iterations from which the true reward stays below its start, and below half of its start.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from compare_methods import CONFIG, read

PLANTED = Path(__file__).with_name("planted_rewards.py")
PROXIES = ("vivid", "dark", "busy")
TRUE = "reward/truth/mean"
SETTINGS = (
    "algorithm.preset=flow_grpo_window",
    "algorithm.objective.clip_range=1e-3",
    "train.groups=2",
    "train.group_size=12",
    "train.updates=1",
    "train.learning_rate=3e-4",
    "train.schedule=constant",
    "train.ema={decay: 0.9, warmup: 10}",
    "eval.prompts=64",
    "eval.every=4",
    "eval.save=0",
    "run.checkpoint.every=8",
    "run.checkpoint.keep=1",
    "run.processes=1",
)
WATCHED = "{use: shapes, name: truth}"


def proxies_by(weight: float) -> str:
    """Return the three proxies as entries of a list of rewards."""
    return ", ".join(f"{{use: '{PLANTED}:{proxy}', weight: {weight}}}" for proxy in PROXIES)


def trained_on(proxies: str, combine: str, *settings: str) -> list[str]:
    """Return the settings of a way that trains on the proxies themselves."""
    return [f"rewards=[{proxies}]", f"eval_rewards=[{WATCHED}]", f"algorithm.baseline.combine={combine}", *settings]


WAYS = {
    "mean": trained_on(proxies_by(1 / len(PROXIES)), "sum"),
    "worst": trained_on(proxies_by(1), "worst"),
    "cautious": trained_on(proxies_by(1), "cautious", "algorithm.baseline.caution=1.0"),
    "wins": [
        f"rewards=[{{use: preference, options: {{compare: '{PLANTED}:better', both_orders: false}}}}]",
        f"eval_rewards=[{WATCHED}, {proxies_by(1)}]",
    ],
}


def truth(folder: Path) -> dict[int, float]:
    """Return the true held-out reward at each evaluation of a run, by iteration."""
    return {line["step"]: line[TRUE] for line in read(folder) if line["phase"] == "eval"}


def proxies(folder: Path) -> float:
    """Return the mean of the proxies' held-out means at a run's last evaluation."""
    last = [line for line in read(folder) if line["phase"] == "eval"][-1]
    return statistics.mean(last[f"reward/{name}/mean"] for name in PROXIES)


def fallen(curve: dict[int, float], part: float) -> str:
    """Return in words the first iteration from which the reward stays below `part` of that before training."""
    below = None
    for step in sorted(curve, reverse=True):
        if curve[step] >= part * curve[0]:
            break
        below = step
    return "never" if below is None else f"iteration {below}"


def command(way: str, seed: int, out: Path, iterations: int) -> list[str]:
    """Return the command that trains a run, or resumes it."""
    settings = [
        *SETTINGS,
        *WAYS[way],
        f"train.iterations={iterations}",
        f"run.seed={seed}",
        f"run.dir={out}",
        f"run.name={way}-seed{seed}",
        "run.resume=auto",
    ]
    return [sys.executable, "-m", "flowgrpo", "train", str(CONFIG), *settings]


def train(way: str, seed: int, out: Path, iterations: int) -> None:
    """Train one run to its last iteration, unless that was done before."""
    folder = out / f"{way}-seed{seed}"
    if iterations not in truth(folder):
        line, log = command(way, seed, out, iterations), folder.with_suffix(".log")
        with log.open("a") as file:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            status = subprocess.run(line, stdout=file, stderr=file, env=environment, check=False).returncode
        if status:
            raise RuntimeError(f"{shlex.join(line)} ended with {status}: {log.read_text()[-2000:]}")
    curve = truth(folder)
    print(f"{folder.name}: true {curve[0]:.3f} -> {curve[iterations]:.3f}, proxies {proxies(folder):.2f}", flush=True)


def report(out: Path, iterations: int) -> None:
    """Print the table of all complete runs."""
    heads = ["trained on", "seed", "true, before", "true, best", "true, end", "proxies"]
    heads += ["below start from", "below half of start from"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for way in WAYS:
        for folder in sorted(path for path in out.glob(f"{way}-seed*") if path.is_dir()):
            curve = truth(folder)
            if iterations not in curve:
                continue
            best = max(curve, key=curve.get)
            cells = [
                f"`{way}`",
                folder.name.rpartition("seed")[2],
                f"{curve[0]:.3f}",
                f"{curve[best]:.3f} after {best}",
                f"{curve[iterations]:.3f}",
                f"{proxies(folder):.2f}",
                fallen(curve, 1.0),
                fallen(curve, 0.5),
            ]
            print(f"| {' | '.join(cells)} |")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--iterations", type=int, default=32)
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side")
    options = parser.parse_args()
    if options.command == "report":
        report(options.out, options.iterations)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.at_once) as pool:
        chosen = [(way, seed) for seed in options.seeds for way in options.ways]
        for job in [pool.submit(train, way, seed, options.out, options.iterations) for way, seed in chosen]:
            job.result()


if __name__ == "__main__":
    main()
