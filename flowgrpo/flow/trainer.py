"""The loop over a flow model: trees grown by a policy, credited and updated by the five axes.

It asks a policy for velocities, the axes for a plan, units, advantages and a loss, and never which method that is.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import torch

from flowgrpo.data.prompts import Row
from flowgrpo.flow import calibration
from flowgrpo.flow.config import Config
from flowgrpo.flow.methods.credit import calibrated, step_signs, trunk_ends
from flowgrpo.flow.methods.kernel import Preserving
from flowgrpo.flow.pipeline import guidance
from flowgrpo.flow.pipeline.policy import Policy
from flowgrpo.flow.replay import replayed
from flowgrpo.flow.rollout import Rollout, drafted, rollout
from flowgrpo.flow.update import Credited, step
from flowgrpo.training.baseline import combined
from flowgrpo.training.evaluate import evaluate
from flowgrpo.training.groups import Groups
from flowgrpo.training.loop import Loop
from flowgrpo.training.report import peak_bytes
from flowgrpo.training.samples import Sample
from flowgrpo.training.weights import Weights
from samplers import noise
from samplers.trees import Root


class Trainer(Loop):
    """One run over a policy; arguments as of `Loop`, and

    Args:
        policy: what is trained; its modules have adapters or are unfrozen.
    """

    def __init__(self, config: Config, policy: Policy, weights: Weights, *args: Any, **kwargs: Any):
        super().__init__(config, weights, *args, **kwargs)
        self.policy = policy
        self.training_call = guidance.training_call(config.model.guidance, policy)
        guided = {name: policy.call.get(name) for name in self.training_call}
        self.eval_call = {**guided, **config.eval.call}  # evaluation is guided as the pipeline's user would have it
        self.levels: list[float] | None = None  # of the kernel's noise, where they are calibrated

    def run(self) -> None:
        """Train to the last iteration; raises as `Loop.run`."""
        with self.policy.call_overrides(**self.training_call):
            self._prepare()
            super().run()

    @property
    def _evaluations(self) -> int:
        return self.policy.evaluations

    def _before(self) -> None:
        if self.config.algorithm.kernel.calibrate is not None:
            self._calibrate()

    @torch.no_grad()
    def _prepare(self) -> None:
        """Encode what this process will meet."""
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        with self.policy.call_overrides(**self.eval_call):
            self.policy.prepare([Row(p.text, 0, p.columns) for p in self.eval_prompts[rank::processes]])
        settings = self.config.algorithm.kernel.calibrate
        before = 0 if settings is None or self.done else settings.rounds  # iterations that come before the first
        to_come = range(self.done - before, self.config.train.iterations)
        if self.config.prompts.pick.by == "shuffle":
            places = [place for i in to_come for place in self._groups(i).prompts[rank::processes]]
        else:
            places = range(len(self.train_prompts))  # which of them nobody knows yet
        rows = [self._row(place, 0) for place in dict.fromkeys(places)]
        self.policy.prepare(rows)
        self.policy.start(rows[:1])  # the sigmas are known from here on
        self.policy.offload()

    def _row(self, place: int, seed: int) -> Row:
        prompt = self.train_prompts[place]
        return Row(prompt.text, seed, prompt.columns)

    def _iterate(self) -> dict[str, Any]:
        config = self.config
        started, evaluations = time.perf_counter(), self.policy.evaluations
        groups = self._groups(self.done)
        rolled = self._rollout(self.done, groups)
        decoded = len(rolled.tree.leaves) + self._drafts(groups)
        rollout_evaluations = self.policy.evaluations - evaluations
        rolled_out = time.perf_counter()
        credited, seen = self._credit(rolled, groups)
        measured = []
        for part in range(config.train.updates):
            self._set_learning_rate(part)
            measured.append(
                step(
                    self.policy,
                    self.weights,
                    self.optimizer,
                    config.algorithm.objective,
                    credited,
                    part,
                    config.train.max_grad_norm,
                    self._sum,
                    self.scaler,
                )
            )
        update_evaluations = self.policy.evaluations - evaluations - rollout_evaluations
        moved = self._policy_metrics(measured)
        self.beta = config.algorithm.objective.kl.adapted(self.beta, moved["policy/kl"])
        return {
            **seen,
            **moved,
            **self._counts(rollout_evaluations, update_evaluations, measured, decoded),
            "time/rollout": rolled_out - started,
            "time/reward": rolled.scores.seconds,
            "time/update": time.perf_counter() - rolled_out,
            "memory/peak_bytes": peak_bytes(self.accelerator.device),
        }

    def _rollout(self, iteration: int, groups: Groups) -> Rollout:
        config, algorithm = self.config, self.config.algorithm
        kernels = algorithm.kernel.kernels(len(self.policy.sigmas) - 1, self.levels)
        return rollout(
            self.policy,
            algorithm.tree.plan(kernels, config.train.group_size, config.run.seed, iteration),
            self._roots(iteration, groups),
            self.rewards,
            config.train.rollout_rows,
            config.run.seed,
            iteration,
            algorithm.objective.needs_old_means,
        )

    def _calibrate(self) -> None:
        """Find the noise level of each step, or take it from the run's folder, where it is kept."""
        settings, started, evaluations = (
            self.config.algorithm.kernel.calibrate,
            time.perf_counter(),
            self.policy.evaluations,
        )
        kept = calibration.read(self.folder, begun=self.done > 0)
        if kept is not None:
            self.levels = kept.levels
            if not self.done:  # the line of a run that was killed before its first checkpoint was dropped
                self.report.write(kept.line)
            return
        self.levels = [kernel.level for kernel in self.config.algorithm.kernel.kernels(len(self.policy.sigmas) - 1)]
        rounds, decoded = [], 0
        for past in range(settings.rounds):
            iteration = past - settings.rounds  # before iteration 0, with noise of its own
            groups = self._groups(iteration)
            rolled = self._rollout(iteration, groups)
            decoded += len(rolled.tree.leaves) + self._drafts(groups)
            signs = step_signs(rolled.tree, combined(rolled.scores.values, self.reward_weights))
            positive, negative = self._sum(signs)
            rounds.append({"levels": self.levels, "positive": positive.tolist(), "negative": negative.tolist()})
            highest = 1.0 if isinstance(self.config.algorithm.kernel, Preserving) else math.inf
            self.levels = calibrated(self.levels, positive, negative, settings.step, settings.balance, highest)
        own = torch.tensor([self.policy.evaluations - evaluations, decoded], dtype=torch.float64)
        evaluated, decoded = (int(n) for n in self._sum(own))
        line = {
            "step": 0,
            "phase": "calibration",
            "cost/model_evaluations": evaluated,
            "cost/decoded": decoded,
            "time/calibration": time.perf_counter() - started,
        }
        if self.accelerator.is_main_process:
            calibration.write(self.folder, calibration.Calibration(self.levels, line), rounds)
        self.report.write(line)

    def _roots(self, iteration: int, groups: Groups) -> list[Root]:
        """This process's roots of the iteration. Groups are integers, and every process has as many of each part."""
        parts = self._parts(iteration, groups)
        return [
            Root(group, index, row, parts[group][index])
            for group in range(self.accelerator.process_index, len(parts), self.accelerator.num_processes)
            for index, row in enumerate(self._starts(iteration, group, groups))
        ]

    def _starts(self, iteration: int, group: int, groups: Groups) -> list[Row]:
        """The rows of a group's roots."""
        train, place, number = self.config.train, groups.prompts[group], groups.roots[group]
        shared = self.config.algorithm.tree.start == "shared"

        def row(start: int) -> Row:
            return self._row(place, noise.seed(self.config.run.seed, "start", iteration, group, start))

        if train.draft is None:
            return [row(0 if shared else index) for index in range(number)]
        pool = [row(start) for start in range(train.draft.pool * number)]
        with self.policy.call_overrides(**train.draft.call):
            return drafted(self.policy, pool, self.rewards, self.reward_weights, number, train.rollout_rows)

    def _drafts(self, groups: Groups) -> int:
        """How many samples this process drafts for the groups of an iteration."""
        own = sum(groups.roots[self.accelerator.process_index :: self.accelerator.num_processes])
        return 0 if self.config.train.draft is None else own * self.config.train.draft.pool

    def _credit(self, rolled: Rollout, groups: Groups) -> tuple[Credited, dict[str, Any]]:
        """Advantages over the units of all processes, and what the rewards looked like."""
        config, algorithm, tree = self.config, self.config.algorithm, rolled.tree
        units = algorithm.credit.units(tree, rolled.scores.values, self.reward_weights)
        places = trunk_ends(tree)
        ends, of_ends = rolled.scores.values[places], [tree.nodes[tree.leaves[i]].root.group for i in places]
        advantages, trained, seen = self._compared(units, ends, of_ends, rolled.scores, groups)
        known = units.values.isfinite().any(1)
        units = replace(units, weight=units.weight.where(known, 0.0))  # a lost sample's edges weigh nothing
        step_weights = algorithm.objective.weights(tree.trained_steps, tree.sigma_cap)
        group_weight = groups.weights[units.comparison[:, 0]]
        credited = Credited(tree, units, advantages, step_weights, self.beta, group_weight)
        left = replayed(config, tree, units, advantages.where(known, torch.nan), trained, self.done)
        return replace(credited, tree=left), seen

    def _sampled(self) -> list[Sample]:
        config = self.config
        with self.policy.call_overrides(**self.eval_call):
            return evaluate(
                self.policy.generate,
                self.eval_prompts,
                [*self.rewards, *self.eval_rewards],
                config.train.rollout_rows,
                self.accelerator,
                keep=config.eval.save,
            )
