"""The one loop: rollout -> score -> credit -> update -> log -> checkpoint, whatever kind of model is trained.

What an iteration does with its model is a subclass's: `flowgrpo.flow.trainer` for flows, `flowgrpo.mdlm.trainer` for texts.
"""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from flowgrpo.data.prompts import Prompt
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training import checkpoint, idle, parts, selection
from flowgrpo.training.baseline import Units, combined, zero_std_fraction
from flowgrpo.training.evaluate import parted, weighted
from flowgrpo.training.groups import Groups, groups_of
from flowgrpo.training.history import History
from flowgrpo.training.optimize import Measured
from flowgrpo.training.report import Report
from flowgrpo.training.samples import Sample, SampleFolder
from flowgrpo.training.scorer import Scores
from flowgrpo.training.weights import Weights
from rewards import Reward

ROUNDING = 1e-9  # an advantage below it is what sums of equal rewards leave


class Stopped(Exception):
    """The run ended early, after a whole iteration; `status` is what the command exits with.

    Args:
        sentence: where, and why.
        rest: which checkpoint a resume goes on from, as the head of the command.
    """

    status: int

    def __init__(self, sentence: str, rest: str):
        super().__init__(sentence)
        self.rest = rest


class Interrupted(Stopped):
    """The run was asked to stop."""

    status = 130


class NothingToLearn(Stopped):
    """So many iterations in a row as `run.patience` says had no advantage other than 0, or no update that could be made."""

    status = 1


class Diverged(Stopped):
    """The trained weights are not finite, and no iteration can mend them; checkpoints are of before."""

    status = 1


class Loop(ABC):
    """One run.

    Args:
        config: numbers and choices.
        weights: what is trained.
        rewards: trained on, by their weighted sum.
        train_prompts, eval_prompts: rows of prompts; without eval prompts nothing is evaluated.
        eval_rewards: watched only.
        folder: the run's folder, which exists.

    Attributes:
        after_evaluation: called with the folder, on the main process, once the samples of an evaluation are written.
    """

    def __init__(
        self,
        config: RunConfig,
        weights: Weights,
        rewards: Sequence[Reward],
        train_prompts: Sequence[Prompt],
        eval_prompts: Sequence[Prompt] = (),
        eval_rewards: Sequence[Reward] = (),
        folder: Path | None = None,
        accelerator: Accelerator | None = None,
    ):
        self.config, self.weights = config, weights
        self.rewards, self.eval_rewards = list(rewards), list(eval_rewards)
        self.train_prompts, self.eval_prompts = train_prompts, eval_prompts[: config.eval.prompts]
        self.folder = folder or config.run.folder
        self.accelerator = accelerator or Accelerator()
        settings = config.train.optimizer
        self.optimizer = torch.optim.AdamW(
            self._parameter_groups(),
            lr=config.train.learning_rate,
            betas=tuple(settings.betas),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        self.learning_rates = [group["lr"] for group in self.optimizer.param_groups]
        # Half a float's range is too small for gradients; for float32 and bfloat16 this multiplies by nothing.
        self.scaler = torch.amp.GradScaler(self.accelerator.device.type, enabled=config.model.dtype == "float16")
        self.reward_weights = torch.tensor([reward.weight for reward in rewards], dtype=torch.float64)
        self.done = 0  # iterations
        self.history = History(config.train.half_life)
        self.beta = config.algorithm.objective.kl.beta  # may adapt
        self.report = Report(self.folder, self.accelerator, config.train.iterations)
        self.samples = SampleFolder(self.folder)
        self.after_evaluation: Callable[[Path], object] = lambda folder: None
        self.checkpoints = self.folder / "checkpoints"

    @abstractmethod
    def _iterate(self) -> dict[str, Any]:
        """Do an iteration; its metrics."""

    @abstractmethod
    def _sampled(self) -> list[Sample]:
        """A sample of each evaluation prompt, of all processes, made with the weights as they are."""

    @property
    @abstractmethod
    def _evaluations(self) -> int:
        """Model evaluations of this process so far."""

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """What the optimizer moves."""
        return [{"params": self.weights.parameters}]

    def _before(self) -> None:
        """What comes before the first iteration, or before a run goes on."""
        return

    def _set_learning_rate(self, number: int) -> None:
        """Set the rates of an iteration's optimizer step, counted from 0: by its place in the run, so nothing is kept."""
        train = self.config.train
        factor = train.schedule.factor(self.done * train.steps + number, train.iterations * train.steps)
        for group, rate in zip(self.optimizer.param_groups, self.learning_rates, strict=True):
            group["lr"] = rate * factor

    def resume(self) -> None:
        """Go back to a checkpoint of the folder (`checkpoint.resumed`), or to the start, and forget what came after."""
        step = checkpoint.resumed(self.checkpoints)
        if step is not None:
            found = checkpoint.find(self.checkpoints, step)
            self.done, self.beta, history = checkpoint.load(
                found, self.weights, self.optimizer, self.scaler, self.accelerator.process_index
            )
            self.history.restore(history)
        self.accelerator.wait_for_everyone()  # nobody deletes a checkpoint before all have looked at it
        self.report.forget_after(self.done if self.done else -1)
        if self.accelerator.is_main_process:
            self.samples.forget_after(self.done if self.done else -1)
            checkpoint.forget_after(self.checkpoints, self.done)

    def run(self) -> None:
        """Train to the last iteration.

        Raises:
            Interrupted: Ctrl-C or SIGTERM came; the iteration was finished and a checkpoint written.
            NothingToLearn: there was nothing for `run.patience` iterations; a checkpoint was written.
            Diverged: a checkpoint was due, and the weights are not finite; none was written.
        """
        train, run = self.config.train, self.config.run
        empty = 0  # iterations in a row without anything to learn
        with self.report, _stop_requests() as stop:
            self.report.start(self.done)
            self._before()
            if self.done == 0:
                self._evaluate()
            while self.done < train.iterations:
                line = self._iterate()
                self.done += 1
                self.report.write({"step": self.done, "phase": "train", **line})
                empty = empty + 1 if idle.is_idle(line) else 0
                if empty:
                    self.report.warn(f"step {self.done}: nothing to learn, {idle.why(line)}")
                last, tired = self.done == train.iterations, empty == run.patience
                if self.done % self.config.eval.every == 0 or last:
                    self._evaluate()
                stopping = bool(self._sum(torch.tensor(float(stop.is_set))) > 0)
                if self.done % run.checkpoint.every == 0 or last or stopping or tired:
                    self._checkpoint()
                if tired:
                    reason = f"nothing to learn since step {self.done - empty}, {idle.why(line)}"
                    raise NothingToLearn(f"stopped after step {self.done}: {reason}", self._rest())
                if stopping and not last:
                    raise Interrupted(f"interrupted after step {self.done}", self._rest())

    def _groups(self, iteration: int) -> Groups:
        return groups_of(self.config, len(self.train_prompts), self.history, iteration)

    def _parts(self, iteration: int, groups: Groups) -> list[list[int]]:
        """The optimizer step that each sample of each group belongs to."""
        config = self.config
        roots = config.algorithm.roots(config.train.group_size)
        return parts.of_roots(config.train, roots, groups.roots, config.run.seed, iteration)

    def _compared(
        self, units: Units, ends: torch.Tensor, of_ends: Sequence[int], scores: Scores, groups: Groups
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Compare the units of all processes.

        Args:
            ends: (E, R) rewards of this process's trajectories.
            of_ends: their groups.

        Returns:
            of this process's units the advantages (U,) and whether (U,) they are trained on, and what the rewards were like.
        """
        algorithm = self.config.algorithm
        everyone = gather_object([(units, ends, of_ends, scores.lost)])
        together = Units.joined([own[0] for own in everyone])
        prompts = torch.tensor(groups.prompts)[together.comparison[:, 0]].tolist()
        expected = self.history.expected(prompts, self.done)
        weights, select = self.reward_weights, self.config.train.select
        advantages, trained = selection.judged(together, weights, expected, algorithm.baseline, select)
        before = sum(len(own[0].values) for own in everyone[: self.accelerator.process_index])
        mine = slice(before, before + len(units.values))

        rewards, of_ends = torch.cat([own[1] for own in everyone]), [group for own in everyone for group in own[2]]
        total = combined(rewards, self.reward_weights)
        self.history.add([groups.prompts[group] for group in of_ends], total, self.done)
        named = {f"reward/{r.name}/mean": _mean(rewards[:, k]) for k, r in enumerate(self.rewards)}
        finite = total[total.isfinite()]
        teaching = trained & together.values.isfinite().any(1) & advantages.isfinite() & (advantages.abs() > ROUNDING)
        return (
            advantages[mine],
            trained[mine],
            {
                "reward/mean": _mean(total),
                "reward/std": float(finite.std(correction=0)) if len(finite) else None,
                **named,
                "reward/lost": int(sum(own[3].sum() for own in everyone)),
                "groups/zero_std_fraction": zero_std_fraction(combined(together.values, weights), together.comparison),
                "groups/left_out_fraction": float((~trained).double().mean()),
                "groups/teaching": len(together.comparison[teaching, 0].unique()),
            },
        )

    def _policy_metrics(self, measured: list[Measured]) -> dict[str, Any]:
        everyone = gather_object([measured])
        every = [m for own in everyone for m in own]
        edges = max(1, sum(m.edges for m in every))
        kls = [m.kl for m in every if m.kl is not None]
        drifts = [own[0].drift for own in everyone if own[0].drift is not None]
        return {
            "policy/max_abs_log_ratio": float(torch.tensor(drifts).max()) if drifts else None,
            "policy/mean_abs_log_ratio": sum(m.ratio for m in every) / edges,
            "policy/clip_fraction": sum(m.clipped for m in every) / edges,
            "policy/kl": sum(kls) / edges if kls else None,
            "policy/grad_norm": float(torch.tensor([m.grad_norm for m in measured]).max()),
            "policy/updates": sum(m.taken for m in measured),
            "policy/skipped_updates": sum(m.skipped for m in measured),
            "policy/learning_rate": self.optimizer.param_groups[0]["lr"],
        }

    def _counts(self, rolled: int, updated: int, measured: list[Measured], leaves: int) -> dict[str, int]:
        own = torch.tensor([rolled, updated, sum(m.edges for m in measured), leaves], dtype=torch.float64)
        rolled, updated, edges, leaves = (int(n) for n in self._sum(own))
        return {
            "cost/model_evaluations": rolled + updated,
            "cost/rollout_evaluations": rolled,
            "cost/update_evaluations": updated,
            "cost/trained_edges": edges,
            "cost/decoded": leaves,
        }

    def _evaluate(self) -> None:
        if not self.eval_prompts:
            return
        started, random_state = time.perf_counter(), checkpoint.random_state()
        evaluations = self._evaluations
        with self.weights.averaged():
            samples = self._sampled()
        checkpoint.set_random_state(random_state)  # how often one looks must not change what is trained
        totals = torch.tensor([_nan(weighted(sample, self.rewards)) for sample in samples], dtype=torch.float64)
        named = {
            f"reward/{r.name}/mean": _mean(torch.tensor([_nan(sample.rewards[r.name]) for sample in samples]))
            for r in (*self.rewards, *self.eval_rewards)
        }
        finite = totals[totals.isfinite()]
        self.report.write(
            {
                "step": self.done,
                "phase": "eval",
                "reward/mean": _mean(totals),
                "reward/std": float(finite.std(correction=0)) if len(finite) else None,
                "reward/count": len(finite),
                **named,
                "cost/model_evaluations": int(self._sum(torch.tensor(self._evaluations - evaluations))),
                "cost/decoded": len(samples),
                "time/eval": time.perf_counter() - started,
            }
        )
        self._watch()
        if self.accelerator.is_main_process:
            self.samples.write(samples, self.done)
            self.after_evaluation(self.folder)

    def _watch(self) -> None:
        """Warn of watched rewards that fall while the trained one rises."""
        lines = [line for line in self.report.lines if line["phase"] == "eval"]
        trained = [line["reward/mean"] for line in lines]
        for reward in self.eval_rewards:
            times = parted(trained, [line.get(f"reward/{reward.name}/mean") for line in lines])
            if times >= self.config.eval.watch:
                self.report.warn(
                    f"step {self.done}: the reward rose and {reward.name!r}, which is only watched, fell {times} "
                    "evaluations in a row; look at the samples, the reward may be exploited"
                )

    def _checkpoint(self) -> None:
        if not all(bool(tensor.isfinite().all()) for tensor in self.weights.tensors().values()):
            self.report.warn(f"step {self.done}: the trained weights are not finite")
            raise Diverged(f"stopped after step {self.done}: the trained weights are not finite", self._rest())
        states = gather_object([checkpoint.random_state()])
        if self.accelerator.is_main_process:
            checkpoint.save(
                self.checkpoints,
                self.done,
                self.weights,
                self.optimizer,
                self.scaler,
                states,
                self.beta,
                self.history.state(),
                self.config.run.checkpoint.keep,
                sound=idle.is_sound([line for line in self.report.lines if line["step"] == self.done]),
            )
        self.accelerator.wait_for_everyone()

    def _rest(self) -> str:
        """Which checkpoint a resume goes on from, as the head of the command."""
        step = checkpoint.resumed(self.checkpoints)
        if step is None:
            return "there is no checkpoint, begin again"
        if step < self.done:
            return f"go on from step {step}, the last that was sound,"
        return "a checkpoint is written, go on"

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the processes."""
        if self.accelerator.num_processes == 1:
            return tensor
        return self.accelerator.reduce(tensor.to(self.accelerator.device), "sum")


class _Stop:
    is_set = False


@contextmanager
def _stop_requests() -> Iterator[_Stop]:
    """Note Ctrl-C and SIGTERM instead of dying of them; the second Ctrl-C interrupts at once."""
    stop = _Stop()

    def ask(number: int, frame: object) -> None:
        if stop.is_set and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.is_set = True

    try:
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread, where nobody presses Ctrl-C
        before = {}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _mean(values: torch.Tensor) -> float | None:
    """Mean of the finite values; None if there is none."""
    finite = values[values.isfinite()]
    return float(finite.mean()) if len(finite) else None
