"""The loop over a flow model: trees grown by a policy, credited and updated by the six axes.

The policy gives velocities, the six axes the plan of the trees, units, advantages and the loss; nothing here asks which
method is running. How the loop departs from those of the papers' released code (how a method departs from its source stands
above its row in `flow.methods.presets`):

 1. The update replays the rollout's own calls of the model, the same rows in the same order, so that before the first
    optimizer step every ratio is exactly 1 in float32; Flow-GRPO's code shuffles the samples and cuts them into new batches.
    Where edges leave the update, its calls have another size, or parts are made of edges, the rows are gathered anew, and
    the ratio is 1 up to rounding (see `flow.updates.replay`).
 2. The loss of an optimizer step is the weighted mean over all of its edges, on all processes; there it is a mean over a
    micro-batch, and then the mean of those.
 3. Noise has an address (seed of the run, iteration, group, path in the tree, step), so that it is the same in any batch, on
    any number of processes and after a resume; there each process draws from a generator of its own. With `run.engine` only
    the seeds are addressed, and the noise is the engine's.
 4. Windows and trained steps are drawn once an iteration, for all samples; Flow-GRPO's code draws a window in each call of
    the pipeline, DanceGRPO's the trained steps of each sample.
 5. Samples of advantage 0 stay in the update, unless `algorithm.baseline.drop_zero`; Flow-GRPO's code leaves them out.
 6. A sample whose reward failed is left out of its group's statistics and has weight 0, an edge whose log-probability is not
    finite leaves the update, and the rest of the group is trained on. An optimizer step whose gradient is not finite is
    skipped, and counted.
 7. Held-out prompt i starts from the noise of seed i at every evaluation; Flow-GRPO's code, which evaluates by ODE and with
    the average of the weights as well, draws the starts anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from flowgrpo.data.prompts import Row
from flowgrpo.flow.config import Config
from flowgrpo.flow.engine import correction
from flowgrpo.flow.engine.rollout import EngineRollout
from flowgrpo.flow.methods import likelihood_rules
from flowgrpo.flow.offline.bank_samples import losers, resampled, root_of
from flowgrpo.flow.offline.stored_groups import Source
from flowgrpo.flow.pipeline import guidance
from flowgrpo.flow.pipeline.policy import Policy
from flowgrpo.flow.planning.graph_budget import KeptGraphs
from flowgrpo.flow.rollouts import cheap_finishes, noise_calibration
from flowgrpo.flow.rollouts.adaptive_tree import Shaping
from flowgrpo.flow.rollouts.cheap_finishes import Finishing
from flowgrpo.flow.rollouts.draft_rollout import Chosen, Drafting, agreement, drafted, first, foretold
from flowgrpo.flow.rollouts.probe_calls import probe_calls
from flowgrpo.flow.rollouts.prompt_encoding import encode_run, eval_call, longest_and_shortest, rows_of
from flowgrpo.flow.rollouts.rollout import Batch, rollout, score_leaves
from flowgrpo.flow.rollouts.state_preview import StatePreviews
from flowgrpo.flow.updates import rollout_graphs
from flowgrpo.flow.updates.noised import finite, noised_of, taken
from flowgrpo.flow.updates.replay import replayed
from flowgrpo.flow.updates.tree_record import parts
from flowgrpo.flow.updates.update import Credited, update_part
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.advantages.prompt_groups import Groups
from flowgrpo.training.distributed.assignment import Assignment, parts_of, pool_of
from flowgrpo.training.engine.asking import rolled_out, seed_of, told
from flowgrpo.training.fitting.batch_sizes import ROLLOUT, ProbeCalls
from flowgrpo.training.loop import Loop
from flowgrpo.training.reports.samples import Sample
from flowgrpo.training.run import random_states
from flowgrpo.training.run.phases import phase
from flowgrpo.training.scoring import rollout_batch
from flowgrpo.training.scoring.held_out import evaluate
from flowgrpo.training.weights import low_precision_copies
from flowgrpo.training.weights.optimizer_step import UpdateStats
from flowgrpo.training.weights.trained_weights import Weights
from samplers import noise
from samplers.trees import Plan, Root, Tree


class Trainer(Loop):
    """Train one flow model; arguments as of `Loop`, and

    Args:
        policy: what is trained; its modules have adapters or are unfrozen.
        engine: that rolls out; None where the policy does.
        source: of samples that were made before; None where they are rolled out.
    """

    config: Config
    policy: Policy
    kept_graphs: KeptGraphs

    def __init__(
        self,
        config: Config,
        policy: Policy,
        weights: Weights,
        *,
        engine: EngineRollout | None = None,
        source: Source | None = None,
        **options: Any,
    ):
        super().__init__(config, weights, **options)
        self.policy, self.engine, self.source = policy, engine, source
        if source is not None:
            self.reward_names, self.credited = source.names, source.combination
        self.training_call = guidance.training_call(config.model.guidance, policy)
        self.eval_call = eval_call(config, policy)
        self.levels: list[float] | None = None  # of the kernel's noise, where they are calibrated
        self.kept_graphs = KeptGraphs(self)
        self.shaping = Shaping(config) if config.algorithm.tree.adapts else None
        self.copies = low_precision_copies.Copies(config, policy.modules.values())
        self.drafting = Drafting(config, policy, self.copies)
        self.finishing = Finishing(config, policy, self.copies, self.credited)

    @override
    def run(self) -> None:
        encode_run(
            self.policy,
            self.config,
            self.train_prompts,
            self.eval_prompts if self.roles.samples_held_out(self.accelerator.process_index) else (),
            done=self.done,
            shares=self.shares,
            rolls_out=not self.roles.evaluates(self.accelerator.process_index),
        )
        with self.policy.call_overrides(**self.training_call):
            self.policy.start(rows_of(longest_and_shortest(self.train_prompts)[:1]))
            likelihood_rules.check_policy(self.config, self.policy)
            self.policy.offload()
            super().run()

    @override
    def probe_calls(self) -> ProbeCalls:
        held_out = self.eval_prompts if self.roles.samples_held_out(self.accelerator.process_index) else ()
        call, draft = self.eval_call, self.drafting.call
        return probe_calls(self.policy, self.weights, self.train_prompts, held_out=held_out, call=call, draft=draft)

    @override
    def on_start(self) -> None:
        """Calibrate the noise of each step, where the kernel asks for it, and see whether rollouts keep graphs."""
        if self.config.algorithm.kernel.calibrate is not None:
            with phase("calibrating"), random_states.random_state_kept():  # a resume does not calibrate again
                kernels = self.config.algorithm.kernel.kernels(len(self.policy.sigmas) - 1)
                self.levels = noise_calibration.calibrate(self, [kernel.level for kernel in kernels], self._rollout_at)
            self.retrying.agree(within=False)
        self.kept_graphs.decide()

    @override
    def rollout_state(self) -> Any:
        """The noise levels, where they are calibrated, or the shapes of a tree that adapts."""
        return self.levels if self.shaping is None else self.shaping.state()

    @override
    def take_rollout_state(self, state: Any) -> None:
        if self.shaping is None:
            self.levels = state
        else:
            self.shaping.restore(state)

    @override
    def own_state(self) -> Any:
        return self.kept_graphs.state()

    @override
    def take_own_state(self, state: Any) -> None:
        self.kept_graphs.restore(state)

    @override
    def copies_to_come(self) -> int:
        return self.copies.to_come

    @override
    def on_compared(self, units: CreditUnits) -> None:
        """Learn what the siblings of each step tell, where the tree adapts."""
        if self.shaping is not None:
            self.shaping.learn(units, self.combination.weights, self.policy.sigmas, self.done)

    @override
    def rollout(self, iteration: int, groups: Groups) -> Batch:
        """Grow this process's trees, whose leaves are the samples; or take stored ones."""
        config, assignment, sigmas = self.config, self.assignment(iteration, groups), self.policy.sigmas
        self.weights.draw_snapshot(config.run.seed, "bank", iteration)
        if self.source is not None:
            return self.source.batch(groups, assignment, sigmas, iteration=iteration, device=self.accelerator.device)
        algorithm = config.algorithm if self.shaping is None else self.shaping.algorithm(iteration)
        kernels = algorithm.kernel.kernels(len(self.policy.sigmas) - 1, self.levels)
        plan = algorithm.plan(kernels, config.train.group_size, config.run.seed, iteration)
        if self.engine is not None:
            return self._by_engine(self.engine, iteration, groups, plan)
        self.kept_graphs.growing = False
        with self.weights.policy(algorithm.sampler), self.copies.kept():  # who samples, drafts
            starts = self._starts(iteration, groups)
            self.kept_graphs.growing = True
            roots = self._roots(iteration, groups, starts.starts)
            made = StatePreviews(config, self.policy, self.rewards)
            watched = made.watch(iteration, roots)
            scoring: dict[str, Any] = {"rewards": self.rewards, "assignment": assignment, "gather": self.gather_rolled}
            scoring |= {"iteration": iteration, "micro_batch": config.train.rollout_rows, "share": self.share}
            tree, scores = rollout(
                self.policy,
                plan,
                roots,
                seed=config.run.seed,
                solver=algorithm.solver,
                keep_means=algorithm.objective.needs_old_means,
                keep_graphs=self.kept_graphs.held,
                evaluate=watched,
                finish=self.finishing.over(watched),
                **scoring,
            )
            finished = self.finishing.finished(algorithm, tree, scores, kernels=kernels, **scoring)
            previews = made.of(tree, scores, watched, leads=self.share.leads)
        drafts = len(self._pool(iteration, groups).own)
        return Batch(groups, tree, scores, drafts, draft_rewards=starts.rewards, previews=previews, finished=finished)

    def _by_engine(self, engine: EngineRollout, iteration: int, groups: Groups, plan: Plan) -> Batch:
        """Let the engine walk this process's chains, and score them as they stand here; errors as of `rolled_out`."""
        size, means = self.config.train.rollout_rows, self.config.algorithm.objective.needs_old_means
        roots = self._roots(iteration, groups, first(groups.roots).starts)  # a draft is refused
        rolled = rolled_out(self, lambda: engine.roll_out(plan, roots, micro_batch=size, keep_means=means))
        scores = score_leaves(
            rolled.tree,
            lambda leaves, rows: rolled.samples[list(leaves)],
            self.rewards,
            size,
            assignment=self.assignment(iteration, groups),
            gather=self.gather_rolled,
            share=self.share,
        )
        return Batch(groups, rolled.tree, scores, 0, engine=rolled.engine)

    @override
    def units(self, batch: Batch) -> CreditUnits:
        columns, weights = self.credited.columns(batch.scores.values), self.credited.weights
        return self.config.algorithm.credit.units(batch.tree, columns, weights)

    @override
    def advantages(
        self, units: CreditUnits, batch: rollout_batch.Batch
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        advantages, trained, seen = super().advantages(units, batch)
        assert isinstance(batch, Batch)
        if batch.draft_rewards is not None:
            pairs = foretold(batch.tree, self.combination.total(batch.scores.values), batch.draft_rewards)
            seen |= agreement([pair for own in self.collectives.gather_shares([pairs]) for pair in own])
        if batch.finished is not None and batch.finished.pairs is not None:
            every = self.collectives.gather_shares([batch.finished.pairs])
            seen |= cheap_finishes.agreement([pair for own in every for pair in own])
        section = self.config.run.engine
        if batch.engine is not None and section is not None:
            own = correction.mismatch(batch.tree, batch.engine, section.truncate)
            seen |= told(self, own, unit="dimension", same="model, precision and guidance")
        return advantages, trained, seen

    @override
    def update(
        self, batch: Batch, units: CreditUnits, advantages: torch.Tensor, trained: torch.Tensor
    ) -> list[UpdateStats]:
        """Give each edge its unit's advantage, take an optimizer step on each part of them, and return their statistics."""
        credit = partial(self.credit_edges, batch, units, advantages, trained)
        undo, free = partial(rollout_graphs.drop, batch.tree.evaluations), self.kept_graphs.give_up
        held = [self.retrying.attempt(ROLLOUT, credit, undo=undo, give_up=free)]
        self.record_trees(
            parts(self.config, self.credited, batch, held[0], iteration=self.done, names=self.reward_names)
        )
        return self.retrying.steps(held, credit, self._update_part, self.config.train.updates, undo=undo, give_up=free)

    @override
    def on_updated(self, moved: dict[str, Any]) -> None:
        """Adapt the coefficient of the divergence (`beta`), where it has a target, and let earlier policies follow."""
        self.weights.after_iteration()
        self.beta = self.config.algorithm.objective.kl.adapted(self.beta, moved["policy/kl"])

    @override
    def eval_samples(self) -> list[Sample]:
        """Sample by ODE, guided as `eval_call` says, with what was trained at the steps of `eval.adapter_steps` alone."""
        part = self.config.eval.adapter_steps
        with self.policy.call_overrides(**self.eval_call), self.policy.limited(part, self.weights.enable_training):
            return evaluate(
                self.policy.generate,
                self.eval_prompts,
                [*self.rewards, *self.eval_rewards],
                micro_batch=self.config.train.rollout_rows,
                share=self.share,
                gather=self.collectives.gather_shares,
                keep=self.config.eval.save,
            )

    def credit_edges(
        self, batch: Batch, units: CreditUnits, advantages: torch.Tensor, trained: torch.Tensor
    ) -> Credited:
        """Return the tree that the update replays, with its edges' advantages and weights; arguments as of `update`."""
        algorithm, tree = self.config.algorithm, batch.tree
        known = units.values.isfinite().any(1)
        units = replace(units, weight=units.weight.where(known, 0.0))  # a lost sample's edges weigh nothing
        if algorithm.likelihood.name == "elbo":
            return self._noised(batch, units, advantages=advantages, trained=trained & known)
        return Credited(
            tree=replayed(
                self.config,
                tree,
                units=units,
                advantages=advantages.where(known, torch.nan),
                trained=trained,
                iteration=self.done,
            ),
            units=units,
            advantages=advantages,
            step_weights=algorithm.objective.weights(tree.trained_steps, tree.sigma_cap),
            beta=self.beta,
            group_weight=batch.groups.weights[units.comparison[:, 0]],
            correction=correction.edge_weights(batch.tree, batch.engine, self.config.run.engine),
        )

    def _noised(self, batch: Batch, units: CreditUnits, *, advantages: torch.Tensor, trained: torch.Tensor) -> Credited:
        """The samples that the update scores, for `likelihood: elbo`; arguments as of `credit_edges`."""
        config, tree = self.config, batch.tree
        keep, of_leaves = (units.to_edges(each.double())[tree.leaves] for each in (trained, advantages))
        keep = taken(config.algorithm.objective, tree, of_leaves, (keep > 0) & finite(tree))
        if batch.stored and config.algorithm.sampler == "bank":
            tree = self._with_samples_of_bank(batch, losers(tree, of_leaves, keep))
            keep &= finite(tree)
        weight = batch.groups.weights[units.comparison[:, 0]]
        return Credited(
            tree=tree,
            units=units,
            advantages=advantages,
            step_weights={},
            beta=self.beta,
            group_weight=weight,
            noised=noised_of(
                config, tree, units, keep=keep, advantages=of_leaves, group_weight=weight, iteration=self.done
            ),
        )

    def _with_samples_of_bank(self, batch: Batch, leaves: Sequence[int]) -> Tree:
        """The tree of stored samples with those of the drawn snapshot in the place of some leaves'."""
        roots = [root_of(batch.tree, leaf) for leaf in leaves]
        rows = [self._row_at(self.done, batch.groups, root.group, root.index) for root in roots]
        with self.weights.policy("bank"):
            return resampled(self.config, self.policy, batch.tree, leaves, rows=rows, iteration=self.done)

    def _update_part(self, credited: Credited, part: int) -> UpdateStats:
        self._set_learning_rate(part)
        rows = rows_of(longest_and_shortest(self.train_prompts)[:1])
        with guidance.updating(self.config.model.guidance, self.policy, rows):
            return update_part(
                self.policy,
                credited,
                part,
                weights=self.weights,
                optimizer=self.optimizer,
                scaler=self.scaler,
                objective=self.config.algorithm.objective,
                max_grad_norm=self.config.train.max_grad_norm,
                sum_shares=self.collectives.sum_shares,
                sum_processes=self.collectives.sum_gradients,
            )

    def _rollout_at(self, iteration: int, levels: list[float]) -> Batch:
        self.levels = levels
        return self.retrying.attempt(ROLLOUT, lambda: self.rollout(iteration, self.groups(iteration)), within=False)

    def _roots(self, iteration: int, groups: Groups, starts: Sequence[Sequence[int]]) -> list[Root]:
        """This process's roots of the iteration, from the starts of each group; groups are integers."""
        of_roots = parts_of(self.config, groups, iteration)
        shared = self.config.algorithm.tree.start == "shared"
        roots = []
        for group, index in self.assignment(iteration, groups).own:
            row = self._row_at(iteration, groups, group, 0 if shared else starts[group][index])
            roots.append(Root(group, index, row, of_roots[group][index]))
        return roots

    def _starts(self, iteration: int, groups: Groups) -> Chosen:
        """The starts of each group's roots: the first, or those that a draft chose."""
        train, pool = self.config.train, self._pool(iteration, groups)
        if train.draft is None:
            return first(groups.roots)
        with self.drafting.computing():
            return drafted(
                self.policy,
                pool,
                [self._row_at(iteration, groups, *member) for member in pool.own],
                rewards=self.rewards,
                combination=self.combination,
                numbers=groups.roots,
                micro_batch=train.rollout_rows,
                gather=self.gather_rolled,
                share=self.share,
            )

    def _row_at(self, iteration: int, groups: Groups, group: int, start: int) -> Row:
        prompt = self.train_prompts[groups.prompts[group]]
        if self.engine is None:
            seed = noise.seed(self.config.run.seed, "start", iteration, group, start)
        else:
            seed = seed_of(self.config.run.seed, iteration, group) + start
        return Row(prompt.text, seed, prompt.columns)

    def _pool(self, iteration: int, groups: Groups) -> Assignment:
        """The starts that are sampled for the draft of an iteration; none without one."""
        return pool_of(self.config, groups, iteration=iteration, share=self.share)
