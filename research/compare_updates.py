"""Compare the updates that methods make at fixed weights: direction, noise, and what a step along them gains.

    python research/compare_updates.py run OUT [--tasks shapes patterns] [--at start half] [--methods ...]
    python research/compare_updates.py report OUT

Whole runs of one method differ by more than methods do. Here no weight moves: many independent batches of each method,
of about `BATCH` model evaluations each, give the mean of its update and the noise around it. An update is a gradient as
Adam divides it: by the root of the mean square of each weight's gradients, over the batches. Then held-out prompts are
sampled by ODE from equal seeds, with the weights moved by `--length` (root mean square over the weights) along the mean
of the updates, and against it. Half the difference of the two rewards is the gain along the mean.

With m the length of the mean and s^2 the variance of one batch's update around it, summed over weights, the mean of n
batches has the expected cosine m / sqrt(m^2 + s^2 / n) with the true mean. A step of fixed length gains, to first order,
the gain along the true mean times this cosine. The table has the gain of a step along as many batches as 1,000 model
evaluations pay for, or 10 seconds. Errors are standard errors: jackknife over batches, paired over prompts; that of the
mean's own direction is not in them. Gradients are clipped as in a run.

`half` are the weights after `HALF` iterations of the task's config; the reference is the model before them. Results are
kept in OUT, one file for each method, and not measured again; those of other options are refused. Seconds are CPU seconds
of one thread.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it, also in the workers

import argparse
import json
import math
import multiprocessing
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator

from flowgrpo import config, train
from flowgrpo.data import prompts
from flowgrpo.data.embedded import EMBEDDED
from flowgrpo.errors import InputError
from flowgrpo.flow import setup
from flowgrpo.flow.config import Config
from flowgrpo.flow.methods.presets import PRESETS
from flowgrpo.flow.pipeline.loading.load import load_pipeline
from flowgrpo.flow.planning.plan import plan
from flowgrpo.training.loop import Loop
from flowgrpo.training.run.run_data import RunData
from flowgrpo.training.scoring import scorer
from rewards.memory import keep_freed_memory

CONFIGS = Path(__file__).parents[1] / "configs"
BATCH = 500  # model evaluations of a batch, about
LENGTHS = {"shapes": 2e-4, "patterns": 3e-4}  # of a step on each task, the learning rates of its best runs
TASKS, POINTS = tuple(LENGTHS), ("start", "half")
HALF = 12  # iterations of the task's config
SIZES = {"tempflow": 6, "tempflow_fast": 6, "adaptive": 6, "mc_grpo": 5}  # samples of a group; of other presets 4
# These have no update of their own: `opd` follows a teacher; at fixed weights the others have the update of the named one.
SAME = {"opd": None, "pepg": "epg", "elbo_grpo": "epg", "nft": "epg"}
QUIET = {"train.updates": 1, "train.ema": None, "eval.every": 10**6, "eval.save": 0, "run.trees": None}


class Recorder(torch.optim.Optimizer):
    """Keeps the gradient of each step, as one vector (P,), and moves nothing."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]):
        super().__init__(parameters, {"lr": 0.0})
        self.gradients: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> None:
        """Keep the gradient."""
        own = self.param_groups[0]["params"]
        self.gradients.append(torch.cat([(p.new_zeros(p.shape) if p.grad is None else p.grad).flatten() for p in own]))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is measured of a method.

    Attributes:
        gram: (n, n) inner products of the updates of n batches, divided by the number of weights.
        evaluations: model evaluations of a batch, in the mean.
        seconds: CPU seconds of a batch, in the mean.
        gains: for each held-out prompt half the difference of its rewards after a step along the mean and after one
            against it.
        options: what else was asked of the measurement.
    """

    gram: list[list[float]]
    evaluations: float
    seconds: float
    gains: list[float]
    options: dict[str, Any]

    def noise(self, without: int | None = None) -> float:
        """Return the variance of one batch's update over the square of its mean; infinity if no mean is seen.

        `without` leaves a batch out.
        """
        gram = torch.tensor(self.gram, dtype=torch.float64)
        kept = [i for i in range(len(gram)) if i != without]
        gram = gram[kept][:, kept]
        n, square = len(gram), float(gram.diagonal().mean())
        signal = (float(gram.sum()) - n * square) / (n * (n - 1))
        return (square - signal) / signal if signal > 0 else math.inf

    def cosine(self, batches: float) -> float:
        """Return the expected cosine of the mean of so many batches with the true mean."""
        return 1 / math.sqrt(1 + self.noise() / batches)

    def expected_gain(self, batches: float) -> tuple[float, float]:
        """Return the expected gain of a step of fixed length along the mean of so many batches, and its error."""
        count, gains = len(self.gram), torch.tensor(self.gains, dtype=torch.float64)

        def share(noise: float) -> float:  # of the cosine with the true mean that the mean of all batches has
            if noise == math.inf:
                return math.sqrt(batches / count)
            return math.sqrt((1 + noise / count) / (1 + noise / batches))

        parts = torch.tensor([share(self.noise(i)) for i in range(count)], dtype=torch.float64)
        of_share = float(((count - 1) * (parts - parts.mean()).square().mean()).sqrt())
        gain, of_gain = float(gains.mean()), float(gains.std() / len(gains) ** 0.5)
        return gain * share(self.noise()), math.hypot(share(self.noise()) * of_gain, gain * of_share)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One method on one task."""

    task: str
    at: str
    name: str
    overrides: Sequence[str]
    out: Path
    batches: int
    prompts: int
    length: float

    @property
    def file(self) -> Path:
        """The file of the result."""
        return self.out / self.task / self.at / f"{self.name}.json"

    @property
    def model(self) -> Path:
        """The folder of the half-way weights."""
        return self.out / self.task / "half-way"

    @property
    def options(self) -> dict[str, Any]:
        """What the result depends on, besides its place."""
        asked = {"overrides": list(self.overrides), "batches": self.batches, "prompts": self.prompts}
        return {**asked, "length": self.length}

    def done(self) -> bool:
        """Return whether the result is there; end the program if it is one of other options."""
        if not self.file.is_file():
            return False
        kept = json.loads(self.file.read_text()).get("options")
        if kept != self.options:
            sys.exit(f"{self.file} was measured with {kept}, not {self.options}: take it away, or another folder")
        return True


def settings_of(job: Job, folder: str) -> Config:
    """Return the config of a method, with as many groups as `BATCH` model evaluations pay for."""
    preset, *asked = job.overrides
    keys = {**QUIET, "algorithm": {"preset": preset}, "train.group_size": SIZES.get(preset, 4)}
    keys |= {"run.dir": folder, "run.name": "run", "run.processes": 1, "eval.prompts": job.prompts}
    if job.at == "half":
        keys |= {"model.path": str(job.model), "model.call": EMBEDDED[job.task].call}
    texts = [f"{key}={json.dumps(value)}" for key, value in keys.items()]

    def load(groups: int) -> Config:
        return cast("Config", config.load(CONFIGS / f"{job.task}.yaml", [*texts, f"train.groups={groups}", *asked]))

    cost = plan(load(1))["model_evaluations"]
    return load(max(1, round(BATCH / (cost["rollout"] + cost["update"]))))


@contextmanager
def opened(job: Job) -> Iterator[Loop]:
    """Return a context with the loop of a method whose optimizer is a `Recorder`."""
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(job, folder)
        rewards, _ = scorer.rewards(settings.rewards, settings.eval_rewards)
        held_out = list(islice(cycle(prompts.load_split(settings.prompts, "eval")), job.prompts))
        data = RunData(prompts.load_split(settings.prompts, "train"), held_out, rewards)
        loop = setup.trainer(settings, Accelerator(cpu=True), data)
        weights = loop.state.weights
        loop.state.optimizer = Recorder(weights.parameters)
        if job.at == "half" and settings.algorithm.reference is not None:
            start = setup.load_policy(job.task).modules
            weights.put_reference({f"{n}.{path}": p for n, m in start.items() for path, p in m.named_parameters()})
        settings.run.folder.mkdir()
        with loop.wing.session(), loop.state.report, loop.background:
            loop.batch_sizes.prepare()
            yield loop


def held_out(loop: Loop, step: torch.Tensor) -> torch.Tensor:
    """Return the reward (N,) of each held-out prompt by weights moved by `step` (P,)."""
    parameters = loop.state.weights.parameters
    parts = step.split([p.numel() for p in parameters])
    with loop.state.weights.swap([p.detach() + part.view_as(p) for p, part in zip(parameters, parts, strict=True)]):
        samples = [list(sample.rewards.values()) for sample in loop.wing.eval_samples()]
    return loop.state.combination.total(torch.tensor(samples, dtype=torch.float64))


def updates(loop: Loop, batches: int) -> tuple[torch.Tensor, float, float]:
    """Return the updates (n, P) of so many batches, and the evaluations and CPU seconds of one."""
    evaluations = seconds = 0.0
    recorder = cast("Recorder", loop.state.optimizer)
    loop.wing.start(loop.calls.rollout, loop.batch_sizes.to_come)  # calibrates noise levels
    for number in range(batches):
        loop.state.done = number
        begun = time.process_time()
        evaluations += loop.iterate()["cost/model_evaluations"]
        seconds += time.process_time() - begun
        if len(recorder.gradients) == number:  # all rewards of each group were equal
            recorder.gradients.append(torch.zeros(sum(p.numel() for p in loop.state.weights.parameters)))
    gradients = torch.stack(recorder.gradients)
    return gradients / gradients.square().mean(0).sqrt().clamp(min=1e-30), evaluations / batches, seconds / batches


def measure(job: Job) -> None:
    """Measure a method and write its result."""
    torch.set_num_threads(1)
    keep_freed_memory()
    with opened(job) as loop:
        directions, evaluations, seconds = updates(loop, job.batches)
        gram = directions @ directions.T / directions.shape[1]
        mean = directions.mean(0)
        step = -job.length * mean / mean.square().mean().sqrt().clamp(min=1e-30)  # against the gradient of the loss
        gains = (held_out(loop, step) - held_out(loop, -step)) / 2
        found = Measured(
            gram=gram.tolist(), evaluations=evaluations, seconds=seconds, gains=gains.tolist(), options=job.options
        )
        job.file.parent.mkdir(parents=True, exist_ok=True)
        job.file.write_text(json.dumps(asdict(found)))
        print(f"{job.task} {job.at} {job.name}: {' '.join(cells(found))}", flush=True)


def cells(found: Measured | None) -> list[str]:
    """Return the cells of a result in the table: the cosine, and the gains in thousandths."""
    if found is None:
        return ["", "", ""]
    amounts = (1000 / found.evaluations, 10 / found.seconds)
    gains = [found.expected_gain(amount) for amount in amounts]
    return [f"{found.cosine(amounts[0]):.2f}", *(f"{1000 * gain:.1f} ± {1000 * error:.1f}" for gain, error in gains)]


def half_way(job: Job) -> None:
    """Train the task's config for `HALF` iterations and write the pipeline."""
    with tempfile.TemporaryDirectory() as folder:
        keys = {"train.iterations": HALF, "train.schedule": "constant", "run.dir": folder, "run.processes": 1}
        run = train(CONFIGS / f"{job.task}.yaml", {**keys, "eval.prompts": 1, "eval.save": 0, "run.trees": None})
    whole = load_pipeline(job.task, torch.float32)  # a run does not keep its text encoders
    for name, network in run.policy.modules.items():
        getattr(whole, name).load_state_dict(network.state_dict())
    whole.save_pretrained(job.model)


def parsed(methods: Sequence[str]) -> dict[str, list[str]]:
    """Return the preset and the overrides of each method by its name."""
    pairs = [method.partition("=") for method in methods]
    return {name: shlex.split(rest) if rest else [name] for name, _, rest in pairs}


def run(options: argparse.Namespace) -> None:
    """Measure all methods that have no result yet, in two processes; raise InputError before that if one cannot be run."""
    methods = parsed(options.methods or [name for name in PRESETS if name not in SAME])
    common: dict[str, Any] = {"out": options.folder, "batches": options.batches, "prompts": options.prompts}
    places = [(task, at) for task in options.tasks for at in options.at]
    jobs = [
        Job(task=task, at=at, name=name, overrides=asked, length=options.length or LENGTHS[task], **common)
        for name, asked in methods.items()
        for task, at in places
    ]
    left = [job for job in jobs if not job.done()]
    for job in left:
        try:
            settings_of(replace(job, at="start"), str(job.out))  # half-way weights may not be there yet
        except InputError as error:
            raise InputError(f"--methods {job.name}: {error}") from error
    with ProcessPoolExecutor(options.at_once, multiprocessing.get_context("spawn")) as pool:
        half = {job.task: job for job in left if job.at == "half" and not job.model.is_dir()}
        list(pool.map(half_way, half.values()))
        list(pool.map(measure, left))


def report(options: argparse.Namespace) -> None:
    """Print a table for each point, ordered by the gain of 1,000 evaluations on the first task."""
    for at in POINTS:
        found = {
            (folder.parent.name, file.stem): Measured(**json.loads(file.read_text()))
            for folder in options.folder.glob(f"*/{at}")
            for file in folder.glob("*.json")
        }
        tasks = [task for task in TASKS if any(task == of for of, _ in found)]
        heads = [f"{task}: {head}" for task in tasks for head in ("cosine", "1,000 evaluations", "10 s")]
        if tasks:
            print(f"\n| {' | '.join([at, *heads])} |\n|{'---|' * (1 + len(heads))}")

        def rank(name: str, found: dict[tuple[str, str], Measured] = found, tasks: list[str] = tasks) -> list[float]:
            seen = [found.get((task, name)) for task in tasks]
            return [-each.expected_gain(1000 / each.evaluations)[0] if each else math.inf for each in seen]

        for name in sorted({name for _, name in found}, key=rank):
            rows = [cell for task in tasks for cell in cells(found.get((task, name)))]
            print("| " + " | ".join([f"`{name}`", *rows]) + " |")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("folder", type=Path, metavar="OUT")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--at", nargs="+", choices=POINTS, default=["start"])
    parser.add_argument("--methods", nargs="+", help="by default all presets, without those of equal updates")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=128, help="held-out prompts, each sampled twice")
    parser.add_argument("--length", type=float, help="of the step, root mean square; by default that of the task")
    parser.add_argument("--at-once", type=int, default=2, help="processes; one for each core")
    options = parser.parse_args(arguments)
    if options.batches < 3:
        parser.error(f"--batches: {options.batches} tell no error, take 3 or more")
    try:
        {"run": run, "report": report}[options.command](options)
    except InputError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
