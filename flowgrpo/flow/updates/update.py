"""The update: replay a rollout's evaluations, or score its samples, and take one optimizer step for each part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from flowgrpo.flow.methods.objectives.policy_gradient import LossInputs, PolicyGradient, TrainedStep
from flowgrpo.flow.pipeline.policy import Policy
from flowgrpo.flow.updates import rollout_graphs
from flowgrpo.flow.updates.noised import Matching, Noised
from flowgrpo.flow.updates.path_ratios import PathRatios
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.weights.optimizer_step import UpdateStats, optimizer_step
from flowgrpo.training.weights.trained_weights import Weights
from samplers.kernels import State, log_prob
from samplers.trees import Edges, Evaluation, Tree, edge_transition


@dataclass(frozen=True, kw_only=True)
class Credited:
    """A rollout's tree with the advantages and the loss weights of its edges or samples.

    Attributes:
        tree: the tree that the update replays, or whose samples it scores.
        units: U credit units of the tree's edges.
        advantages: (U,) advantage of each unit.
        step_weights: weight in the loss of each trained (kernel, sigma, sigma_next).
        beta: coefficient of the divergence.
        group_weight: (U,) factor of the loss of each unit, of its group and of an early stop (1 / chance); it does not
            count in the divisor of the mean.
        correction: (nodes,) importance weight of the edge to each node, a factor as `group_weight`; None without an engine.
        stopped: by part, the weight of the edges of chains that were stopped; it counts in the divisor alone.
        noised: the samples of an update with likelihood elbo; None if it replays the tree.
    """

    tree: Tree
    units: CreditUnits
    advantages: torch.Tensor
    step_weights: dict[TrainedStep, float]
    beta: float
    group_weight: torch.Tensor
    correction: torch.Tensor | None = None
    stopped: Mapping[int, float] = field(default_factory=dict)
    noised: Noised | None = None

    def of_edges(self, nodes: torch.Tensor) -> torch.Tensor:
        """Return the advantages (E,) of the edges that lead to `nodes`; 0 without a unit."""
        return self.units.to_edges(self.advantages)[nodes]

    def weights(self, edges: Edges) -> torch.Tensor:
        """Return the weights (E,) of edges in the weighted mean of the loss; 0 without a unit."""
        return self.units.to_edges(self.units.weight)[edges.nodes]

    def factors(self, edges: Edges) -> torch.Tensor:
        """Return the factors (E,) of the edges' losses: group weight times correction."""
        of_groups = self.units.to_edges(self.group_weight)[edges.nodes]
        return of_groups if self.correction is None else of_groups * self.correction[edges.nodes]


def update_part(
    policy: Policy,
    credited: Credited,
    part: int,
    *,
    weights: Weights,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    objective: PolicyGradient,
    max_grad_norm: float,
    sum_shards: Callable[[torch.Tensor], torch.Tensor],
    sum_processes: Callable[[torch.Tensor], torch.Tensor] | None,
    moved: bool,
) -> UpdateStats:
    """Take one optimizer step on the edges or samples of one part; return its statistics on this process.

    No step is taken if all weights of the part are 0 or a gradient is not finite. Evaluations are replayed whole: same
    rows, same order. The loss is the weighted mean, over all edges of the part on all processes, of each edge's loss times
    its factors. The divisor is the sum of the weights without the factors, those of stopped chains too.

    Args:
        scaler: gradient scaler for float16; may be disabled.
        sum_shards: sums a tensor over the data shards.
        sum_processes: sums a tensor over all processes; each process of a data shard has a part of the shard's
            gradient. None for one process.
        moved: whether the policy may have moved since the rollout. Only then the ratios of whole trajectories are
            computed, in a first pass without gradient; before that they are 1.
    """
    stats = UpdateStats()
    evaluations = [e for e in credited.tree.evaluations if e.part == part and e.trained]
    if credited.noised is None:
        local = sum(float(credited.weights(edges).sum()) for e in evaluations for edges in e.trained)
    else:
        local = credited.noised.weight(part)
    total, stopped = sum_shards(torch.tensor([local, credited.stopped.get(part, 0.0)], dtype=torch.float64)).tolist()
    if total == 0:
        rollout_graphs.drop(evaluations)
        return stats
    optimizer.zero_grad(set_to_none=True)
    if credited.noised is None:
        replay = _Replay(policy=policy, weights=weights, objective=objective, credited=credited, stats=stats)
        losses = replay.losses(evaluations, moved=moved)
    else:
        matching = Matching(
            policy=policy, weights=weights, objective=objective, noised=credited.noised, beta=credited.beta
        )
        losses = matching.losses(part, stats, sum_shards)
    for loss in losses:
        weights.lockstep.backward(scaler.scale(loss / (total + stopped)))
    optimizer_step(
        weights, stats, optimizer=optimizer, scaler=scaler, max_grad_norm=max_grad_norm, reduce=sum_processes
    )
    return stats


@dataclass(frozen=True, kw_only=True)
class _Replay:
    """The losses of one optimizer step that replays evaluations."""

    policy: Policy
    weights: Weights
    objective: PolicyGradient
    credited: Credited
    stats: UpdateStats

    def losses(self, evaluations: Sequence[Evaluation], *, moved: bool) -> Iterator[torch.Tensor]:
        """Yield for each evaluation the weighted sum of its edges' losses; for `moved` see `update_part`."""
        paths = None if self.objective.span == "edge" else PathRatios(self.credited.tree)
        if evaluations and evaluations[0].velocity is not None:
            self.stats.max_abs_log_ratio = self._drift(evaluations[0])
        if paths is not None and self.objective.span == "trajectory":
            for evaluation in evaluations if moved else ():
                for edges, log_ratio in self._log_ratios(evaluation):
                    paths.add(edges, log_ratio)
            paths.join()
        for evaluation in evaluations:
            yield self._loss(evaluation, paths)

    def _drift(self, evaluation: Evaluation) -> float:
        """Return the largest |log ratio| of an extra model call to the rollout; the kept graph would always give 0."""
        counted = self.policy.evaluations
        log_ratios = [log_ratio for _, log_ratio in self._log_ratios(evaluation)]
        self.policy.evaluations = counted  # the extra call does not count
        return float(torch.cat(log_ratios).abs().max())

    @torch.no_grad()
    def _log_ratios(self, evaluation: Evaluation) -> list[tuple[Edges, torch.Tensor]]:
        """Return the trained edges of an evaluation with their log ratios (E,), from a model call without gradient."""
        assert evaluation.state is not None
        velocity = self.policy.velocity(evaluation.state, evaluation.sigma, evaluation.rows)
        each = [(edges, self._inputs(evaluation, edges, velocity, None)) for edges in evaluation.trained]
        return [(edges, inputs.log_prob - inputs.old_log_prob) for edges, inputs in each]

    def _loss(self, evaluation: Evaluation, paths: PathRatios | None) -> torch.Tensor:
        """Return the weighted sum of the losses of an evaluation's edges; add their log ratios to `paths`."""
        credited, objective = self.credited, self.objective
        beta, state, sigma = credited.beta, evaluation.state, evaluation.sigma
        assert state is not None
        reference = None
        if beta > 0:
            with torch.no_grad(), self.weights.policy("reference"):
                reference = self.policy.velocity(state, sigma, evaluation.rows)
        kept, evaluation.velocity = evaluation.velocity, None  # a graph serves one backward pass
        velocity = self.policy.velocity(state, sigma, evaluation.rows) if kept is None else kept
        loss = torch.zeros((), device=state[0].device)
        for edges in evaluation.trained:
            inputs = self._inputs(evaluation, edges, velocity, reference)
            if paths is not None:
                inputs = self._of_path(inputs, edges, paths)
            per_edge = objective.loss(inputs) * credited.step_weights[edges.move.kernel, sigma, edges.sigma_next]
            divergence = objective.divergence(inputs) if beta > 0 else None
            if divergence is not None:
                per_edge = per_edge + beta * divergence
            weight = credited.weights(edges) * credited.factors(edges)
            loss = loss + (per_edge * weight.to(per_edge, non_blocking=True)).sum()
            gap, step = inputs.log_prob - inputs.old_log_prob, credited.tree.sigmas.index(sigma)
            self.stats.measure(
                gap, objective.clipped(inputs), objective.above(inputs), divergence=divergence, step=step
            )
        return loss

    def _of_path(self, inputs: LossInputs, edges: Edges, paths: PathRatios) -> LossInputs:
        """Return `inputs` with the log ratios of the objective's span; those of a prefix gain the edges' own."""
        like = inputs.log_prob
        if self.objective.span == "trajectory":
            return replace(inputs, whole=paths.whole(edges).to(like), length=paths.length(edges).to(like))
        earlier, position = paths.earlier(edges).to(like), paths.position(edges).to(like.device)
        paths.add(edges, inputs.log_prob - inputs.old_log_prob)
        return replace(inputs, earlier=earlier, position=position)

    def _inputs(self, evaluation: Evaluation, edges: Edges, velocity: State, reference: State | None) -> LossInputs:
        state, sigma, cap = evaluation.state, evaluation.sigma, self.credited.tree.sigma_cap
        assert state is not None
        assert edges.next_state is not None
        assert edges.log_prob is not None
        mean, std = edge_transition(edges, sigma, state, velocity, cap)
        return LossInputs(
            log_prob=log_prob(edges.next_state, mean, std, edges.move.kernel.log_prob),
            old_log_prob=edges.log_prob,
            advantage=self.credited.of_edges(edges.nodes).to(edges.log_prob, non_blocking=True),
            mean=mean,
            std=std,
            step_size=sigma - edges.sigma_next,
            velocity=None if reference is None else edges.gather(velocity),
            diffuses=edges.move.kernel.diffuses,
            old_mean=edges.mean,
            reference_mean=None if reference is None else edge_transition(edges, sigma, state, reference, cap)[0],
            reference_velocity=None if reference is None else edges.gather(reference),
        )
