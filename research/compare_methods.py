"""Compare methods on an embedded model, at equal wall time or at equal model evaluations; writes a table.

    python research/compare_methods.py run OUT --seeds 0 1 2 --seconds 100 [--methods tempflow branch_grpo ...]
    python research/compare_methods.py report OUT [OUT ...] [--curves FILE.json]
    python research/compare_methods.py run OUT --config configs/mdlm.yaml --work 50000 [--methods gdpo ...]
    python research/compare_methods.py report OUT --config configs/mdlm.yaml --work 50000
    python research/compare_methods.py run OUT --seeds 0 1 2 --work 8000 --rates 3e-5 1e-4 3e-4 [--methods ...]

`run` trains each method (a preset, or NAME='preset key=value ...') with each seed through the command line, one thread
per run, two runs at a time (--at-once). A run ends when its calibration, rollouts and updates have used the budget:
--seconds, or --work in model evaluations. Held-out evaluation, start-up and checkpoints do not count. A seed fixes the
prompts for all methods alike. Complete runs are not repeated.

`report` reads the metrics of the runs and interpolates their held-out reward at the budget. After a budget of seconds
it also does so at an equal number of model evaluations: --evaluations, or the most that all runs have made. --rise adds
the evaluations that a rise of the reward took. --curves adds the mean curves of all methods, with standard errors, to a JSON
file under the config's name; `scripts/make_figures.py` draws them.

--settings are of all methods. --batch sets each method's groups, so that iterations cost about as many model evaluations.

--rates chooses a learning rate for each method: the one with the highest reward in a run with --rates-seed, which must
not be among --seeds, after --rates-budget if given. Those runs are kept in OUT/rates, and not repeated. Seconds are
wall time, so the machine must be idle.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from flowgrpo import config
from flowgrpo.commands.model_kinds import KINDS
from flowgrpo.errors import InputError
from flowgrpo.flow.methods.presets import PRESETS
from flowgrpo.mdlm.methods.presets import PRESETS as TEXT_PRESETS

CONFIG = Path(__file__).parents[1] / "configs" / "shapes.yaml"
Lines = Sequence[dict[str, Any]]
Methods = dict[str, list[str]]  # names, and the settings of each
ENDLESS = ("train.iterations=10000", "eval.save=0", "run.checkpoint.every=100000", "run.processes=1")
SHAPES = (  # shared by all methods; other numbers of a method stay as published, except its clip range
    "train.groups=2",
    "train.group_size=24",
    "train.updates=2",  # the second is off-policy by one step, so that ratios and clips have an effect
    "train.learning_rate=1e-4",
    "train.schedule=constant",
    "train.ema={decay: 0.9, warmup: 10}",
    "eval.prompts=128",
    *ENDLESS,
)
SETTINGS = {"flow": SHAPES, "mdlm": ENDLESS}
ALL = {"flow": PRESETS, "mdlm": TEXT_PRESETS}
CLIPS = {"normalised_ratio": 2e-5, "constant_free": 1e-4}  # ten times as published, for 1024 dimensions; else 1e-3
LOOKS = 12  # points of a mean curve
UPDATE = 3.3  # cost of an evaluation with a backward pass, in evaluations without one


def trained_seconds(lines: Iterable[dict[str, Any]]) -> float:
    """Return the seconds of rollouts, updates and calibration in metric lines."""
    keys = ("time/rollout", "time/update", "time/calibration")
    return sum(line.get(key, 0.0) for line in lines for key in keys)


def curve(lines: list[dict[str, Any]], cost: Callable[[list[dict[str, Any]]], float]) -> list[tuple[float, float]]:
    """Return (cost so far, held-out reward) at each evaluation, beginning at cost 0.

    The first evaluation also holds before a calibration, which does not change the model.
    """
    points = [(cost(lines[:i]), line["reward/mean"]) for i, line in enumerate(lines) if line["phase"] == "eval"]
    return points if points[0][0] == 0 else [(0.0, points[0][1]), *points]


def evaluations(lines: Iterable[dict[str, Any]]) -> float:
    """Return the model evaluations of training in metric lines."""
    return sum(line["cost/model_evaluations"] for line in lines if line["phase"] != "eval")


def planned(cost: dict[str, Any]) -> float:
    """Return the model evaluations of an iteration by its plan; an update takes what it can from the rollout's graphs."""
    return cost["model_evaluations"]["rollout"] + cost["model_evaluations"]["update"] - cost.get("graphs", 0)


def within(lines: Lines, budget: Budget) -> Lines:
    """Return the lines within the budget."""
    return [line for i, line in enumerate(lines) if budget.used(lines[: i + 1]) <= budget.amount]


def at(points: list[tuple[float, float]], cost: float) -> float:
    """Return the reward at a cost, linearly interpolated between evaluations."""
    for (before, low), (after, high) in pairwise(points):
        if before <= cost <= after:
            return low + (high - low) * (cost - before) / (after - before)
    raise ValueError(f"a run ended at {points[-1][0]:.0f}, before {cost:.0f}")


def reached(points: list[tuple[float, float]], rise: float) -> float | None:
    """Return the cost at which a curve is first `rise` above its start; None if it never is."""
    goal = points[0][1] + rise
    for (before, low), (after, high) in pairwise(points):
        if high >= goal:
            return before + (after - before) * (goal - low) / (high - low)
    return None


@dataclass(frozen=True)
class Budget:
    """Length of a run: the `amount`, a function for the part that metric lines have `used`, and the unit as a word."""

    amount: float
    used: Callable[[Lines], float]
    word: str

    def iteration(self, cost: dict[str, Any]) -> float:
        """Estimate the amount that an iteration uses, from its plan; it only sets the interval of evaluations."""
        if self.used is evaluations:
            return planned(cost)
        rollout, update = cost["model_evaluations"]["rollout"], cost["model_evaluations"]["update"]
        return 3.6e-3 * (rollout + cost["decoded"] + UPDATE * update)


def clip_range(settings: Sequence[str], path: Path) -> list[str]:
    """Return the setting of a flow method's clip range by the form of its ratio; none if it does not clip."""
    algorithm = config.load(path, settings).algorithm
    if not hasattr(algorithm.objective, "clip_range") or not hasattr(algorithm, "kernel"):
        return []
    words = (algorithm.objective.name, algorithm.kernel.log_prob)
    return [f"algorithm.objective.clip_range={next((CLIPS[word] for word in words if word in CLIPS), 1e-3)}"]


def settings_of(overrides: Sequence[str], path: Path) -> list[str]:
    """Return the settings of a method: those that all share, its preset, its clip range, and its own overrides."""
    shared, (preset, *asked) = SETTINGS[config.load(path).kind], overrides
    return [*shared, preset, *clip_range([*shared, *overrides], path), *asked]


def groups(overrides: Sequence[str], path: Path, batch: float) -> str:
    """Return the setting of a method's groups with which an iteration costs about `batch` model evaluations."""
    least = config.load(path, settings_of(overrides, path)).train.updates  # each optimizer step has groups of its own
    chosen = config.load(path, [*settings_of(overrides, path), f"train.groups={least}"])
    return f"train.groups={least * max(1, round(batch / planned(KINDS[chosen.kind].plan.plan(chosen))))}"


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the complete metric lines of a run."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else ()
    return [json.loads(line) for line in lines if line.endswith("\n")]


def finished(folder: Path, budget: Budget) -> bool:
    """Return whether a run has been evaluated at or after its budget."""
    lines = read(folder)
    return any(line["phase"] == "eval" and budget.used(lines[:i]) >= budget.amount for i, line in enumerate(lines))


def trained_by(settings: Any) -> dict[str, Any]:
    """Return the settings that a run's result depends on."""
    return settings.model_dump(mode="json", exclude={"run": True, "eval": {"every"}})


def train(name: str, path: Path, overrides: list[str], seed: int, budget: Budget, looks: int, out: Path) -> float:
    """Train one run of a config to its budget, unless it is complete; return its held-out reward there."""
    run, settings = f"{name}-seed{seed}", settings_of(overrides, path)
    if finished(out / run, budget):
        if trained_by(config.load(out / run / "config.yaml")) != trained_by(config.load(path, settings)):
            raise SystemExit(f"{out / run} was trained by other settings, take it away, or another folder")
        return at(curve(read(out / run), budget.used), budget.amount)
    shutil.rmtree(out / run, ignore_errors=True)
    settings += [f"run.seed={seed}", f"run.dir={out}", f"run.name={run}"]
    chosen = config.load(path, settings)
    cost = KINDS[chosen.kind].plan.plan(chosen)
    every = math.ceil(budget.amount / looks / budget.iteration(cost))
    command = [sys.executable, "-m", "flowgrpo", "train", str(path), *settings, f"eval.every={every}"]
    log = out / f"{run}.log"
    with log.open("w") as file:
        child = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"})
    while child.poll() is None and not finished(out / run, budget):
        time.sleep(0.5)
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
    if child.wait() not in (0, 130):
        raise Failed(f"{shlex.join(command)} failed: {log.read_text()[-2000:]}")
    points = curve(read(out / run), budget.used)
    print(f"{run}: {points[0][1]:.3f} -> {at(points, budget.amount):.3f}", flush=True)
    return at(points, budget.amount)


class Failed(RuntimeError):
    """A run ended before its budget; the message has the end of its log."""


def with_rates(methods: Methods, rates: list[str], train_all: Callable[[Methods], dict[str, float]]) -> Methods:
    """Return each method with the learning rate that gave it the highest reward.

    Args:
        train_all: trains methods and returns the reward of each, minus infinity if its run ended early.
    """
    tried = {
        f"{name}-lr{rate}": [*overrides, f"train.learning_rate={rate}"]
        for name, overrides in methods.items()
        for rate in rates
    }
    rewards = train_all(tried)
    chosen = {name: max((f"{name}-lr{rate}" for rate in rates), key=rewards.__getitem__) for name in methods}
    for name, best in chosen.items():
        seen = ", ".join(f"{rewards[f'{name}-lr{rate}']:.3f} by {rate}" for rate in rates)
        print(f"{best} of {seen}", flush=True)
    return {name: tried[best] for name, best in chosen.items()}


def spread(values: list[float]) -> str:
    """Return the mean and the standard error over seeds, as text."""
    return f"{statistics.mean(values):.3f} ± {standard_error(values):.3f}"


def standard_error(values: list[float]) -> float:
    """Return the standard error of the mean; NaN of a single value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan


def runs_in(folders: list[Path], budget: Budget) -> dict[str, list[Path]]:
    """Return the folders of complete runs by method; end the script if there are none."""
    found: dict[str, list[Path]] = {}
    for folder in folders:
        for path in sorted(folder.iterdir()):
            if path.is_dir() and finished(path, budget):
                found.setdefault(path.name.rpartition("-seed")[0], []).append(path)
    if not found:
        places = ", ".join(map(str, folders))
        sys.exit(f"no run in {places} has been evaluated at or after {budget.amount:g} {budget.word}")
    return found


def rates_of(paths: list[Path]) -> str:
    """Return the learning rates of runs, from their own copies of the config."""
    return ", ".join(sorted({f"{config.load(path / 'config.yaml').train.learning_rate:g}" for path in paths}))


def report(folders: list[Path], budget: Budget, *, work: float | None = None, rise: float | None = None) -> None:
    """Print the table of all complete runs in some folders.

    Args:
        work: model evaluations of the second comparison; by default the most that all runs made.
        rise: a rise of the reward; its model evaluations get a column.
    """
    paths = runs_in(folders, budget)
    runs = {name: [read(path) for path in own] for name, own in paths.items()}
    spent = {name: [curve(lines, budget.used) for lines in own] for name, own in runs.items()}
    by_work = {name: [curve(lines, evaluations) for lines in own] for name, own in runs.items()}
    timed = budget.used is trained_seconds
    work = work or least_work(by_work)
    also = [f"after {work / 1000:.0f}k evaluations"] if timed else []
    also += [] if rise is None else [f"evaluations to +{rise:g}"]
    after = f"after {budget.amount:.0f} s" if timed else f"after {budget.amount / 1000:g}k evaluations"
    header = ["method", "learning rate", "seeds", "before", after, "gain", *also, "iterations", "seconds"]
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    final = {name: [at(points, budget.amount) for points in own] for name, own in spent.items()}
    for name in sorted(final, key=lambda name: -statistics.mean(final[name])):
        before = statistics.mean(points[0][1] for points in spent[name])
        gain = spread([value - points[0][1] for value, points in zip(final[name], spent[name], strict=True)])
        paid = [within(lines, budget) for lines in runs[name]]
        iterations = statistics.mean(sum(line["phase"] == "train" for line in lines) for lines in paid)
        enough = all(points[-1][0] >= work for points in by_work[name])
        worked = [spread([at(points, work) for points in by_work[name]]) if enough else "made fewer"] if timed else []
        if rise is not None:
            met = [cost for points in by_work[name] if (cost := reached(points, rise)) is not None]
            short = "" if len(met) == len(by_work[name]) else f" in {len(met)} of {len(by_work[name])}"
            worked.append(f"{statistics.mean(met) / 1000:.1f}k{short}" if met else "more")
        cells = [
            f"`{name}`",
            rates_of(paths[name]),
            len(final[name]),
            f"{before:.3f}",
            spread(final[name]),
            gain,
            *worked,
            f"{iterations:.0f}",
            f"{statistics.mean(map(trained_seconds, paid)):.0f}",
        ]
        print("| " + " | ".join(map(str, cells)) + " |")


def mean_curves(folders: list[Path], budget: Budget) -> dict[str, Any]:
    """Return the `seeds` and, by method, [cost, mean reward, standard error over seeds] at equal parts of the budget."""
    found: dict[str, list[list[float]]] = {}
    runs = runs_in(folders, budget)
    for name, paths in runs.items():
        curves = [curve(read(path), budget.used) for path in paths]
        for cost in (budget.amount * look / LOOKS for look in range(LOOKS + 1)):
            rewards = [at(points, cost) for points in curves]
            found.setdefault(name, []).append([cost, statistics.mean(rewards), standard_error(rewards)])
    return {"seeds": min(map(len, runs.values())), "methods": found}


def least_work(by_work: dict[str, list[list[tuple[float, float]]]]) -> float:
    """Return the largest number of evaluations that all curves reach."""
    return min(points[-1][0] for own in by_work.values() for points in own)


def parsed(methods: list[str], settings: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the name and the overrides of each method; `settings` are of all."""
    found = {}
    for method in methods:
        name, _, rest = method.partition("=")
        preset, *overrides = shlex.split(rest) if rest else [name]
        axes = f"algorithm={{preset: {preset}}}"  # replaces the whole section of the config
        found[name] = [axes, *settings, *overrides]
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("folders", nargs="+", type=Path, metavar="OUT")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--methods", nargs="+", help="by default all presets")
    parser.add_argument("--settings", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--batch", type=float, metavar="EVALUATIONS", help="of an iteration; sets train.groups")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--work", type=float, metavar="EVALUATIONS", help="the budget, in place of seconds")
    parser.add_argument("--evaluations", type=float, help="of a report's second comparison")
    parser.add_argument("--looks", type=int, default=3, help="held-out evaluations of a run after the first, at least")
    parser.add_argument("--at-once", type=int, default=2, help="runs side by side; one for each core")
    parser.add_argument("--rise", type=float, help="of the held-out reward, whose evaluations a report tells")
    parser.add_argument("--curves", type=Path, metavar="FILE", help="adds a report's mean curves to this JSON file")
    parser.add_argument("--rates", nargs="+", metavar="RATE", help="learning rates to choose each method's from")
    parser.add_argument("--rates-seed", type=int, default=7, help="the seed that chooses")
    parser.add_argument("--rates-budget", type=float, help="of the runs that choose; by default as --work or --seconds")
    options = parser.parse_args()
    budget = Budget(options.seconds, trained_seconds, "seconds")
    if options.work is not None:
        budget = Budget(options.work, evaluations, "evaluations")
    if options.command == "report":
        report(options.folders, budget, work=options.evaluations, rise=options.rise)
        if options.curves is not None:
            found = json.loads(options.curves.read_text()) if options.curves.exists() else {}
            found[options.config.stem] = mean_curves(options.folders, budget)
            options.curves.write_text(json.dumps(found, allow_nan=False) + "\n")
        return
    (out,) = options.folders
    methods = parsed(options.methods or list(ALL[config.load(options.config).kind]), options.settings)
    for name, own in methods.items():
        try:
            config.load(options.config, settings_of(own, options.config))
            own += [groups(own, options.config, options.batch)] if options.batch else []
        except InputError as error:
            parser.error(f"--methods {name}: {error}")

    def reward(job: Future[float], may_fail: bool) -> float:
        try:
            return job.result()
        except Failed as failed:
            if not may_fail:
                raise
            print(failed, flush=True)
            return -math.inf

    def train_all(
        chosen: Methods, seeds: list[int], folder: Path, budget: Budget = budget, may_fail: bool = False
    ) -> list[dict[str, float]]:
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(options.at_once) as pool:
            jobs = {
                (seed, name): pool.submit(train, name, options.config, overrides, seed, budget, options.looks, folder)
                for seed in seeds
                for name, overrides in chosen.items()
            }
            return [{name: reward(jobs[seed, name], may_fail) for name in chosen} for seed in seeds]

    if options.rates:
        if options.rates_seed in options.seeds:
            parser.error(f"--rates-seed {options.rates_seed}: it chooses the rates, take one that is not in --seeds")
        short = replace(budget, amount=options.rates_budget or budget.amount)
        methods = with_rates(
            methods,
            options.rates,
            lambda tried: train_all(tried, [options.rates_seed], out / "rates", short, may_fail=True)[0],
        )
    train_all(methods, options.seeds, out)


if __name__ == "__main__":
    main()
