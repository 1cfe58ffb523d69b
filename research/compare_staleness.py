"""Compare rollouts of different staleness on the embedded model, with and without prefix ratios; writes a table and curves.

    python research/compare_staleness.py run OUT --seeds 0 1 2 --staleness 0 1 2 4
    python research/compare_staleness.py report OUT [--picture staleness.svg]

`run` trains each arm with each staleness and seed through the command line, one thread per run, seed by seed, one run
after another (--at-once N: N at a time). A seed fixes the prompts for all runs alike. Complete runs are not repeated; a
stopped run resumes from its last checkpoint. At staleness 0, with one optimizer step per iteration, every ratio is 1
and the arms are equal, so only the first is run. `report` reads the metrics of the runs. Its table has the held-out
reward after the last iteration, as mean and standard error over seeds, and the paired difference of the arms. --picture
needs matplotlib (pip install -e '.[docs]').
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from compare_methods import CONFIG, read, spread

SETTINGS = (
    "algorithm.preset=flow_grpo_window",
    "algorithm.kernel.log_prob=sum",  # true densities; with `mean` all ratios are within a thousandth of 1
    "train.groups=2",
    "train.group_size=12",
    "train.updates=1",
    "train.learning_rate=3e-4",
    "train.schedule=constant",
    "train.ema={decay: 0.9, warmup: 10}",
    "eval.prompts=128",
    "eval.save=0",
    "run.processes=1",
)
ARMS = {
    "clip": "algorithm.objective={name: clip, clip_range: [0.1, 0.2]}",
    "prefix_ratio": "algorithm.objective={name: prefix_ratio, clip_range: [0.1, 0.2]}",
}
FIRST = next(iter(ARMS))


@dataclass(frozen=True)
class Run:
    """One run of the comparison."""

    arm: str
    staleness: int
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return f"{self.arm}-staleness{self.staleness}-seed{self.seed}"


def runs(seeds: Iterable[int], stalenesses: Iterable[int]) -> list[Run]:
    """Return the runs, seed by seed; at staleness 0 only the first arm."""
    return [
        Run(arm, staleness, seed)
        for seed in seeds
        for staleness in stalenesses
        for arm in (ARMS if staleness else [FIRST])
    ]


def rewards(folder: Path) -> dict[int, float]:
    """Return the held-out reward of each evaluation, by iteration."""
    return {line["step"]: line["reward/mean"] for line in read(folder) if line["phase"] == "eval"}


def clip_fraction(folder: Path) -> float:
    """Return the mean over the iterations of the fraction of edges that the objective clipped."""
    return statistics.mean(line["policy/clip_fraction"] for line in read(folder) if line["phase"] == "train")


def command(run: Run, out: Path, iterations: int) -> list[str]:
    """Return the command that trains a run, or resumes it."""
    settings = [
        *SETTINGS,
        ARMS[run.arm],
        f"run.staleness={run.staleness}",
        f"run.seed={run.seed}",
        f"run.dir={out}",
        f"run.name={run.name}",
        f"train.iterations={iterations}",
        f"eval.every={max(1, iterations // 2)}",
        f"run.checkpoint.every={max(1, iterations // 2)}",
        "run.checkpoint.keep=1",
        "run.resume=auto",
    ]
    return [sys.executable, "-m", "flowgrpo", "train", str(CONFIG), *settings]


def train(run: Run, out: Path, iterations: int) -> None:
    """Train one run to its last iteration, unless that was done before."""
    if iterations in rewards(out / run.name):
        return
    line, log = command(run, out, iterations), out / f"{run.name}.log"
    with log.open("a") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        status = subprocess.run(line, stdout=file, stderr=file, env=environment, check=False).returncode
    if status:
        raise RuntimeError(f"{shlex.join(line)} ended with {status}: {log.read_text()[-2000:]}")
    found = rewards(out / run.name)
    print(f"{run.name}: {found[0]:.3f} -> {found[iterations]:.3f}", flush=True)


def finished(out: Path, iterations: int) -> dict[tuple[str, int], dict[int, Path]]:
    """Return the folders of complete runs, by arm and staleness, then by seed; all arms share those at staleness 0."""
    found: dict[tuple[str, int], dict[int, Path]] = {}
    for folder in sorted(path for path in out.iterdir() if path.is_dir() and iterations in rewards(path)):
        arm, staleness, seed = folder.name.rsplit("-", 2)
        number = int(staleness.removeprefix("staleness"))
        for each in ARMS if number == 0 else [arm]:
            found.setdefault((each, number), {})[int(seed.removeprefix("seed"))] = folder
    return found


def report(out: Path, iterations: int, picture: Path | None) -> None:
    """Print the table of all complete runs, and draw their curves."""
    found = finished(out, iterations)
    if not found:
        sys.exit(f"no run in {out} has come to iteration {iterations}")
    head = [*(f"`{arm}`" for arm in ARMS), "difference", *(f"stopped by `{arm}`" for arm in ARMS)]
    print(f"| staleness | seeds | before | {' | '.join(head)} |\n|{'---|' * (len(head) + 3)}")
    for staleness in sorted({staleness for _, staleness in found}):
        of = [found.get((arm, staleness), {}) for arm in ARMS]
        seeds = sorted(set(of[0]) & set(of[1]))
        if not seeds:
            continue
        ends = [[rewards(folders[seed])[iterations] for seed in seeds] for folders in of]
        before = statistics.mean(rewards(of[0][seed])[0] for seed in seeds)
        apart = spread([ours - plain for plain, ours in zip(*ends, strict=True)]) if staleness else "the same"
        stopped = [f"{statistics.mean(clip_fraction(folders[seed]) for seed in seeds):.2f}" for folders in of]
        cells = [staleness, len(seeds), f"{before:.3f}", *map(spread, ends), apart, *stopped]
        print(f"| {' | '.join(map(str, cells))} |")
    if picture is not None:
        draw(found, iterations, picture)


def draw(found: dict[tuple[str, int], dict[int, Path]], iterations: int, picture: Path) -> None:
    """Draw the final reward against staleness, with a dot per seed, and mean curves over the iterations."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    stalenesses = sorted({staleness for _, staleness in found})
    shades = plt.colormaps["viridis"]
    styles = dict(zip(ARMS, ("-", "--"), strict=True))
    for number, arm in enumerate(ARMS):
        own = [staleness for staleness in stalenesses if (arm, staleness) in found]
        ends = [[rewards(folder)[iterations] for folder in found[arm, staleness].values()] for staleness in own]
        means = [statistics.mean(values) for values in ends]
        axes[0].plot(own, means, styles[arm], marker="o", color=f"C{number}", label=arm)
        for staleness, values in zip(own, ends, strict=True):
            axes[0].plot([staleness] * len(values), values, ".", color=f"C{number}", alpha=0.4)
        for staleness in own:
            curves = [rewards(folder) for folder in found[arm, staleness].values()]
            points = sorted(set.intersection(*(set(curve) for curve in curves)))
            shade = shades(0.9 * staleness / max(1, stalenesses[-1]))
            mean = [statistics.mean(curve[point] for curve in curves) for point in points]
            label = f"{arm}, staleness {staleness}" if staleness else "staleness 0"
            if staleness or arm == FIRST:
                axes[1].plot(points, mean, styles[arm], color=shade, label=label)
    axes[0].set(xlabel="staleness", ylabel=f"held-out reward after {iterations} iterations", xticks=stalenesses)
    axes[1].set(xlabel="iterations")
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(picture)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 2, 4])
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    if options.command == "report":
        report(options.out, options.iterations, options.picture)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.at_once) as pool:
        chosen = runs(options.seeds, options.staleness)
        for job in [pool.submit(train, run, options.out, options.iterations) for run in chosen]:
            job.result()


if __name__ == "__main__":
    main()
