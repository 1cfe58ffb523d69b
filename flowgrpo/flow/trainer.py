"""The training loop of a flow model: grow trees of samples, score them, assign credit, update the policy.

The policy gives velocities. The seven axes of `algorithm` give the plan of the trees, the compared units, the advantages and
the loss; the loop never asks which method is running. It departs from the loops of the papers' released code as follows.
(Departures of a single method stand above its row in `flow.methods.presets`.)

 1. The update replays the rollout's own calls of the model, with the same rows in the same order, so that before the first
    optimizer step every ratio is exactly 1 in float32. If edges leave the update, if rollout and update have unequal batch
    sizes, or with `train.split: edges`, the rows are gathered into new calls and the ratio is 1 up to rounding (see
    `flow.updates.replay`). Flow-GRPO's code shuffles the samples and cuts them into new batches.
 2. The loss of an optimizer step is the weighted mean over all of its edges, on all processes. The released code takes a
    mean over each micro-batch, and then the mean of those.
 3. Noise has an address (seed of the run, iteration, group, path in the tree, step). So it is the same in any batch, on any
    number of processes and after a resume. In the released code each process has its own generator. With `run.engine` only
    the seeds are addressed, and the engine draws the noise.
 4. Windows and trained steps are drawn once an iteration, for all samples. Flow-GRPO's code draws a window in each call of
    the pipeline, DanceGRPO's code the trained steps of each sample.
 5. Samples of advantage 0 stay in the update, unless `algorithm.baseline.drop_zero`. Flow-GRPO's code leaves them out.
 6. A sample whose reward failed is left out of its group's statistics and has weight 0. An edge whose log-probability is not
    finite leaves the update. The rest of the group is trained on. An optimizer step whose gradient is not finite is skipped,
    and counted.
 7. Held-out prompt i starts from the noise of seed i at every evaluation. Flow-GRPO's code draws new noise each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, cast

import torch
from typing_extensions import override

from flowgrpo.data.prompts import Row
from flowgrpo.flow.config import Algorithm, Config
from flowgrpo.flow.methods import likelihood_rules
from flowgrpo.flow.offline.stored_groups import Source
from flowgrpo.flow.pipeline import guidance
from flowgrpo.flow.pipeline.policy import Policy
from flowgrpo.flow.planning import compile_decision
from flowgrpo.flow.planning.graph_budget import RolloutGraphs
from flowgrpo.flow.rollouts import cheap_finishes, draft_rollout, early_stop, noise_calibration
from flowgrpo.flow.rollouts.adaptive_tree import Shaping
from flowgrpo.flow.rollouts.cheap_finishes import Finishing
from flowgrpo.flow.rollouts.hinted_rollout import Hints, separate
from flowgrpo.flow.rollouts.probe_calls import probe_calls
from flowgrpo.flow.rollouts.prompt_encoding import build_rows, encode_run, eval_call, longest_and_shortest
from flowgrpo.flow.rollouts.rollout import Batch, Drawn, rollout, score_leaves
from flowgrpo.flow.rollouts.state_preview import StatePreviews
from flowgrpo.flow.updates.minibatches import FlowMinibatches, credit_edges
from flowgrpo.flow.updates.update import Credited, update_part
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.assembly import build_loop
from flowgrpo.training.distributed.assignment import Assignment, assign_minibatches, assign_pool
from flowgrpo.training.fitting.batch_sizes import ProbeCalls
from flowgrpo.training.loop import Loop
from flowgrpo.training.prompts.prompt_groups import Groups
from flowgrpo.training.reports.samples import FRAME_RATE, Sample
from flowgrpo.training.run import random_states
from flowgrpo.training.run.phases import phase
from flowgrpo.training.scoring.held_out import evaluate
from flowgrpo.training.state import RunState
from flowgrpo.training.weights import low_precision_copies
from flowgrpo.training.weights.optimizer_step import UpdateStats
from flowgrpo.training.weights.trained_weights import Weights
from flowgrpo.training.wing import Compared, Rollout, Wing
from samplers import noise
from samplers.kernels import Kernel
from samplers.trees import Plan, Root, Tree


class Engine(Protocol):
    """An engine that samples in place of the policy (`run.engine`); the package flowgrpo-engine has one."""

    def seed(self, seed: int, iteration: int, group: int, start: int) -> int:
        """Return the engine's seed of a sample."""

    def roll_out(
        self, run: RunState, plan: Plan, roots: Sequence[Root], *, micro_batch: int, keep_means: bool
    ) -> tuple[Tree, torch.Tensor, Drawn]:
        """Return the chains from `roots` as a tree, samples in the order of its leaves, and importance weights of edges."""


class FlowWing(Wing):
    """A flow model in the training loop.

    Args:
        engine: samples rollouts in place of the policy; None if the policy samples them.
        source: stored samples to train on; None if the run samples its own.

    Attributes:
        levels: calibrated noise level of each step; None without calibration.
    """

    kept_graphs: RolloutGraphs

    def __init__(self, run: RunState, *, engine: Engine | None = None, source: Source | None = None):
        self.run, self.engine, self.source = run, engine, source
        self.policy: Policy = run.policy
        self.weights = run.weights
        if source is not None:
            run.reward_names, run.credited = source.names, source.combination
        self.training_call = guidance.training_call(self.config.model.guidance, self.policy)
        self.eval_call = eval_call(self.config, self.policy)
        self.levels: list[float] | None = None
        self.kept_graphs = RolloutGraphs(run)
        self.shaping = Shaping(self.config) if self.config.algorithm.tree.adapts else None
        self.copies = low_precision_copies.Copies(self.config, self.policy.modules.values())
        self.drafting = draft_rollout.Drafting(self.config, self.policy, self.copies)
        self.finishing = Finishing(self.config, self.policy, self.copies, run.credited)
        self.hints = None if self.config.algorithm.hints.name == "none" else Hints(run)
        self.rollout_memory = self.hints

    @property
    def config(self) -> Config:
        """The configuration, with the batch sizes found so far."""
        return cast("Config", self.run.config)

    @override
    @contextmanager
    def session(self) -> Iterator[None]:
        """Encode the coming prompts; within the context the pipeline has the call arguments of training."""
        run = self.run
        encode_run(
            self.policy,
            self.config,
            run.train_prompts,
            run.held_out,
            device=run.accelerator.device,
            done=run.done,
            shards=run.shards,
            rolls_out=not run.roles.evaluates(run.accelerator.process_index),
        )
        with self.policy.call_overrides(**self.training_call):
            self.policy.start(self._typical_rows())
            likelihood_rules.check_policy(self.config, self.policy)
            if self.hints is not None:
                self.hints.prepare(self._typical_rows()[0])
            self.policy.offload()
            yield

    @override
    def probe_calls(self) -> ProbeCalls:
        run, call, draft = self.run, self.eval_call, self.drafting.call
        return probe_calls(self.policy, self.weights, run.train_prompts, held_out=run.held_out, call=call, draft=draft)

    @override
    def settle(self) -> None:
        compile_decision.decide(self.run, self.probe_calls)
        self.kept_graphs.capture()

    @override
    def start(self, rollout: Rollout, to_come: Callable[[int], int]) -> None:
        """Calibrate each step's noise level if the kernel asks for it; decide whether rollouts keep autograd graphs."""

        def at_levels(iteration: int, levels: list[float]) -> Batch:
            self.levels = levels
            return cast("Batch", rollout(iteration, self.run.groups(iteration)))

        kernel = self.config.algorithm.kernel
        if kernel.calibrate is not None:
            # A resumed run does not calibrate again, so the random state must not depend on it.
            with phase("calibrating"), random_states.preserve_random_state():
                levels = [each.level for each in kernel.kernels(len(self.policy.sigmas) - 1)]
                self.levels = noise_calibration.calibrate(self.run, levels, at_levels)
        self.kept_graphs.decide(to_come)

    @override
    def rollout_state(self) -> Any:
        """Return the state of an adaptive tree, or the calibrated noise levels; None if there is neither."""
        return self.levels if self.shaping is None else self.shaping.state()

    @override
    def restore_rollout_state(self, state: Any) -> None:
        if self.shaping is None:
            self.levels = state
        else:
            self.shaping.restore(state)

    @override
    def copies_to_come(self) -> int:
        return self.copies.to_come

    @override
    def rollout(self, iteration: int, groups: Groups) -> Batch:
        """Return this process's trees, whose leaves are the samples: grown by the policy, by an engine, or stored."""
        self.weights.draw_snapshot(self.config.run.seed, "bank", iteration)
        if self.source is not None:
            assignment, device = self.run.assignment(iteration, groups), self.run.accelerator.device
            return self.source.batch(groups, assignment, self.policy.sigmas, iteration=iteration, device=device)
        if self.engine is not None:
            return self._by_engine(self.engine, iteration, groups)
        return self._grow_batch(iteration, groups)

    def _plan(self, iteration: int) -> tuple[Algorithm, Sequence[Kernel], Plan]:
        """Return the axes of an iteration, the kernel of each step, and the plan of the trees."""
        config = self.config
        algorithm = config.algorithm if self.shaping is None else self.shaping.algorithm(iteration)
        kernels = algorithm.kernel.kernels(len(self.policy.sigmas) - 1, self.levels)
        return algorithm, kernels, algorithm.plan(kernels, config.train.group_size, config.run.seed, iteration)

    def _grow_batch(self, iteration: int, groups: Groups) -> Batch:
        """Grow the trees by the policy, decode and score their leaves."""
        run, config, assignment = self.run, self.config, self.run.assignment(iteration, groups)
        algorithm, kernels, plan = self._plan(iteration)
        self.kept_graphs.growing = False
        with self.weights.policy(algorithm.sampler), self.copies.keep():  # drafts use the sampling policy too
            starts = self._starts(iteration, groups)
            self.kept_graphs.growing = True
            roots = self._roots(iteration, groups, starts.starts)
            state_previews = StatePreviews(config, self.policy, run.rewards)
            watched = state_previews.watch(iteration, roots)
            early = early_stop.begin(run, plan, roots, iteration=iteration, evaluate=watched)
            growing: dict[str, Any] = {"seed": config.run.seed, "keep_means": algorithm.objective.needs_old_means}
            scoring: dict[str, Any] = {"rewards": run.rewards, "assignment": assignment, "gather": run.gather_rolled}
            scoring |= {"iteration": iteration, "micro_batch": config.train.rollout_rows, "shard": run.shard}
            tree, scores = rollout(
                self.policy,
                plan,
                roots,
                keep_graphs=self.kept_graphs.addresses(plan),
                keep_shared=algorithm.keeps_shared,
                evaluate=watched if early is None else early.evaluate,
                gate=early,
                finish=self.finishing.over(watched),
                **growing,
                **scoring,
            )
            finished = self.finishing.finished(algorithm, tree, scores, kernels=kernels, **scoring)
            previews = state_previews.of(tree, scores, watched, leads=run.shard.leads)
            drafts = len(self._pool(iteration, groups).own)
            stopped = None if early is None else early.stopped
            made = partial(Batch, groups, tree, scores, drafts, draft_rewards=starts.rewards)
            batch = made(previews=previews, finished=finished, stopped=stopped)
            if self.hints is None:
                return batch
            roll = partial(rollout, self.policy, plan, finish=self.finishing.over(None), **growing, **scoring)
            return self.hints.help(batch, plan, roots, iteration=iteration, roll=roll)

    def _by_engine(self, engine: Engine, iteration: int, groups: Groups) -> Batch:
        """Let the engine sample this process's chains, and score the samples here."""
        run, config, (_, _, plan) = self.run, self.config, self._plan(iteration)
        size, means = config.train.rollout_rows, config.algorithm.objective.needs_old_means
        starts = draft_rollout.take_first_starts(groups.roots).starts  # the config refuses drafts
        roots = self._roots(iteration, groups, starts)
        tree, samples, drawn = engine.roll_out(run, plan, roots, micro_batch=size, keep_means=means)
        scores = score_leaves(
            tree,
            lambda leaves, rows: samples[list(leaves)],
            run.rewards,
            size,
            assignment=run.assignment(iteration, groups),
            gather=run.gather_rolled,
            shard=run.shard,
        )
        return Batch(groups, tree, scores, 0, engine=drawn)

    @override
    def units(self, batch: Batch) -> CreditUnits:
        credited, rule = self.run.credited, self.config.algorithm.credit
        units = rule.units(batch.tree, credited.columns(batch.scores.values), credited.weights)
        if batch.stopped is not None:
            units = batch.stopped.extend(units, batch.tree, credited)
        return units if self.hints is None else separate(units, batch.tree)

    @override
    def observe(self, units: CreditUnits, batch: Batch) -> dict[str, Any]:
        """Learn from the rollout for later ones: an adaptive tree's shape, the hints of each prompt.

        Return the metrics of hints, and of how drafts, cheap finishes and the engine match the policy.
        """
        run, line, gather = self.run, dict[str, Any](), self.run.collectives.gather_shards
        if self.shaping is not None:
            self.shaping.learn(units, run.combination.weights, self.policy.sigmas, run.done)
        if batch.draft_rewards is not None:
            totals = run.combination.total(batch.scores.values)
            pairs = draft_rollout.pair_draft_with_final(batch.tree, totals, batch.draft_rewards)
            line |= draft_rollout.agreement([pair for each in gather([pairs]) for pair in each])
        if batch.finished is not None and batch.finished.pairs is not None:
            line |= cheap_finishes.agreement([pair for each in gather([batch.finished.pairs]) for pair in each])
        if units.survival is not None:
            line |= early_stop.agreement(units, run.credited.weights)
        if batch.hinted is not None and self.hints is not None:
            line |= self.hints.learn(gather([batch.hinted]))
        if batch.engine is not None:
            line |= batch.engine.line(run)
        return line

    @override
    def minibatches(self, batch: Batch, compared: Compared) -> FlowMinibatches:
        return FlowMinibatches(self.run, batch, partial(self.credit_edges, batch, compared), self.take_step)

    @override
    def after_update(self, moved: dict[str, Any]) -> None:
        """Update the old policy and the bank of snapshots; adapt the coefficient of the KL if it has a target."""
        self.weights.after_iteration()
        self.run.beta = self.config.algorithm.objective.kl.adapt(self.run.beta, moved["policy/kl"])

    @override
    def eval_samples(self) -> list[Sample]:
        """Sample and score the held-out prompts by ODE, under the arguments `eval_call`.

        The base model takes the steps outside `eval.adapter_steps`.
        """
        run, part = self.run, self.config.eval.adapter_steps
        with self.policy.call_overrides(**self.eval_call), self.policy.limited(part, self.weights.enable_training):
            return evaluate(
                self.policy.generate,
                run.eval_prompts,
                [*run.rewards, *run.eval_rewards],
                micro_batch=self.config.train.rollout_rows,
                shard=run.shard,
                gather=run.collectives.gather_shards,
                keep=self.config.eval.save,
            )

    def credit_edges(self, batch: Batch, compared: Compared) -> Credited:
        """Return the edges or final samples that the update trains on, with their advantages and weights."""
        return credit_edges(self.run, self.policy, batch, compared, row_at=self._row_at)

    def take_step(self, credited: Credited, number: int) -> UpdateStats:
        """Take the optimizer step on the edges of one minibatch."""
        run, config = self.run, self.config
        run.set_learning_rate(number)
        with guidance.updating(config.model.guidance, self.policy, self._typical_rows()):
            return update_part(
                self.policy,
                credited,
                number,
                weights=self.weights,
                optimizer=run.optimizer,
                scaler=run.scaler,
                objective=config.algorithm.objective,
                max_grad_norm=config.train.max_grad_norm,
                sum_shards=run.collectives.sum_shards,
                sum_processes=run.collectives.sum_gradients,
                moved=config.moved(number),
            )

    def _typical_rows(self) -> list[Row]:
        """Return the row of the longest training prompt, in a list."""
        return build_rows(longest_and_shortest(self.run.train_prompts)[:1])

    def _roots(self, iteration: int, groups: Groups, starts: Sequence[Sequence[int]]) -> list[Root]:
        """Return this process's roots of the iteration; `starts` has the indices of each group's initial noises."""
        of_roots = assign_minibatches(self.config, groups, iteration)
        shared = self.config.algorithm.tree.start == "shared"
        roots = []
        for group, index in self.run.assignment(iteration, groups).own:
            row = self._row_at(iteration, groups, group, 0 if shared else starts[group][index])
            roots.append(Root(group, index, row, of_roots[group][index]))
        return roots

    def _starts(self, iteration: int, groups: Groups) -> draft_rollout.Chosen:
        """Return the starts of each group's roots: the first ones, or those that a draft chose."""
        run, train, pool = self.run, self.config.train, self._pool(iteration, groups)
        if train.draft is None:
            return draft_rollout.take_first_starts(groups.roots)
        with self.drafting.computing():
            return draft_rollout.run_draft(
                self.policy,
                pool,
                [self._row_at(iteration, groups, *member) for member in pool.own],
                rewards=run.rewards,
                combination=run.combination,
                numbers=groups.roots,
                micro_batch=train.rollout_rows,
                gather=run.gather_rolled,
                shard=run.shard,
            )

    def _row_at(self, iteration: int, groups: Groups, group: int, start: int) -> Row:
        prompt, seed = self.run.train_prompts[groups.prompts[group]], self.config.run.seed
        if self.engine is None:
            return Row(prompt.text, noise.seed(seed, "start", iteration, group, start), prompt.columns)
        return Row(prompt.text, self.engine.seed(seed, iteration, group, start), prompt.columns)

    def _pool(self, iteration: int, groups: Groups) -> Assignment:
        """Return which initial noises each process samples from for the draft; none if the run has no draft."""
        return assign_pool(self.config, groups, iteration=iteration, shard=self.run.shard)


def flow_loop(
    config: Config,
    policy: Policy,
    weights: Weights,
    *,
    engine: Engine | None = None,
    source: Source | None = None,
    frame_rate: float = FRAME_RATE,
    **options: Any,
) -> Loop:
    """Return the training loop of a flow model.

    The modules of `policy` have adapters or are unfrozen. For `engine` and `source` see `FlowWing`. `frame_rate` is
    in frames per second, for video samples. `options` are further arguments of `RunState` (rewards, prompts, ...).
    """
    run = RunState(config, policy, weights, **options)
    return build_loop(run, FlowWing(run, engine=engine, source=source), frame_rate=frame_rate)
