"""The update: replay a rollout's evaluations, or score its samples, with gradient, and take one optimizer step per part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

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
    """A rollout's tree, with the advantages and the weights in the loss of its edges, or of its samples.

    Attributes:
        tree: its trained edges are those of the update.
        units: U of them, to which the edges belong.
        advantages: (U,) of the units.
        step_weights: weight in the loss of each trained (kernel, sigma, sigma_next).
        beta: coefficient of the divergence.
        group_weight: (U,) weight of each unit's group; it multiplies the loss, and the mean does not divide by it.
        noised: the samples as the update scores them, by likelihood elbo; None where it replays the tree.
        correction: (nodes,) weight of the edge to each node for having been rolled out by another policy, which multiplies
            the loss likewise; None where the trained policy rolled out.
    """

    tree: Tree
    units: CreditUnits
    advantages: torch.Tensor
    step_weights: dict[TrainedStep, float]
    beta: float
    group_weight: torch.Tensor
    correction: torch.Tensor | None = None
    noised: Noised | None = None

    def of_edges(self, nodes: torch.Tensor) -> torch.Tensor:
        """Advantages (E,) of the edges that lead to `nodes`; 0 for edges without a unit."""
        return self.units.to_edges(self.advantages)[nodes]

    def weights(self, edges: Edges) -> torch.Tensor:
        """Weights (E,) of edges in the weighted mean of the loss; 0 for edges without a unit."""
        return self.units.to_edges(self.units.weight)[edges.nodes]

    def factors(self, edges: Edges) -> torch.Tensor:
        """Factors (E,) of the edges' losses, by which the mean is not divided: of their groups, and of their correction."""
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
    sum_shares: Callable[[torch.Tensor], torch.Tensor],
    sum_processes: Callable[[torch.Tensor], torch.Tensor] | None,
) -> UpdateStats:
    """Take one optimizer step on the edges of one part; return its statistics on this process.

    No step is taken where all weights of the part are 0, or a gradient is not finite.

    The unit of the update is an evaluation of the tree: same rows, same order. The loss is the weighted mean over all
    edges of the part, on all processes, of each edge's loss times its correction and its group's weight: a part of one group
    is scaled by it.

    Args:
        part: number of the optimizer step.
        weights: the trained tensors, those of `optimizer`.
        scaler: of the loss, for float16; a disabled one does nothing.
        sum_shares: sum of a tensor over the shares of the data.
        sum_processes: sum over all processes, None where there is one; those of one share have each a part of its gradient.
    """
    stats = UpdateStats()
    evaluations = [e for e in credited.tree.evaluations if e.part == part and e.trained]
    if credited.noised is None:
        local = sum(float(credited.weights(edges).sum()) for e in evaluations for edges in e.trained)
    else:
        local = credited.noised.weight(part)
    total = float(sum_shares(torch.tensor(local, dtype=torch.float64)))
    if total == 0:
        rollout_graphs.drop(evaluations)
        return stats
    optimizer.zero_grad(set_to_none=True)
    if credited.noised is None:
        losses = _replayed(policy, weights, objective, credited=credited, evaluations=evaluations, stats=stats)
    else:
        matching = Matching(
            policy=policy, weights=weights, objective=objective, noised=credited.noised, beta=credited.beta
        )
        losses = matching.losses(part, stats, sum_shares)
    for loss in losses:
        weights.lockstep.backward(scaler.scale(loss / total))
    optimizer_step(
        weights, stats, optimizer=optimizer, scaler=scaler, max_grad_norm=max_grad_norm, reduce=sum_processes
    )
    return stats


def _replayed(
    policy: Policy,
    weights: Weights,
    objective: PolicyGradient,
    *,
    credited: Credited,
    evaluations: Sequence[Evaluation],
    stats: UpdateStats,
) -> Iterator[torch.Tensor]:
    """Yield the weighted sum of the loss of each evaluation's edges."""
    paths = PathRatios(credited.tree) if objective.needs_prefix else None
    if evaluations and evaluations[0].velocity is not None:
        stats.max_abs_log_ratio = _drift(policy, credited.tree, evaluations[0])
    for evaluation in evaluations:
        yield _loss(policy, weights, objective, credited=credited, evaluation=evaluation, paths=paths, stats=stats)


@torch.no_grad()
def _drift(policy: Policy, tree: Tree, evaluation: Evaluation) -> float:
    """The largest |log ratio| of an evaluation whose graph was kept, by calling the model again, which is not counted.

    By its graph it is 0 whatever a replay would make of it.
    """
    counted, state, sigma = policy.evaluations, evaluation.state, evaluation.sigma
    assert state is not None  # of what is trained on
    velocity = policy.velocity(state, sigma, evaluation.rows)
    policy.evaluations = counted
    gaps = []
    for edges in evaluation.trained:
        mean, std = edge_transition(edges, sigma, state, velocity, tree.sigma_cap)
        assert edges.next_state is not None
        assert edges.log_prob is not None
        gaps.append((log_prob(edges.next_state, mean, std, edges.move.kernel.log_prob) - edges.log_prob).abs())
    return float(torch.cat(gaps).max())


def _loss(
    policy: Policy,
    weights: Weights,
    objective: PolicyGradient,
    *,
    credited: Credited,
    evaluation: Evaluation,
    paths: PathRatios | None,
    stats: UpdateStats,
) -> torch.Tensor:
    """Weighted sum of the loss of an evaluation's edges, whose log ratios are added to `paths`."""
    beta, state, sigma = credited.beta, evaluation.state, evaluation.sigma
    assert state is not None
    reference = None
    if beta > 0:
        with torch.no_grad(), weights.policy("reference"):
            reference = policy.velocity(state, sigma, evaluation.rows)
    kept, evaluation.velocity = evaluation.velocity, None  # a graph is good for one backward pass
    velocity = policy.velocity(state, sigma, evaluation.rows) if kept is None else kept
    loss = torch.zeros((), device=state[0].device)
    for edges in evaluation.trained:
        inputs = _loss_inputs(credited, evaluation, edges=edges, velocity=velocity, reference=reference)
        if paths is not None:
            earlier = paths.earlier(edges).to(inputs.log_prob)
            inputs = replace(inputs, earlier=earlier, position=paths.position(edges).to(earlier.device))
            paths.add(edges, inputs.log_prob - inputs.old_log_prob)
        per_edge = objective.loss(inputs) * credited.step_weights[edges.move.kernel, sigma, edges.sigma_next]
        divergence = objective.divergence(inputs) if beta > 0 else None
        if divergence is not None:
            per_edge = per_edge + beta * divergence
        weight = credited.weights(edges) * credited.factors(edges)
        loss = loss + (per_edge * weight.to(per_edge, non_blocking=True)).sum()
        gap, step = inputs.log_prob - inputs.old_log_prob, credited.tree.sigmas.index(sigma)
        stats.measure(gap, objective.clipped(inputs), objective.above(inputs), divergence=divergence, step=step)
    return loss


def _loss_inputs(
    credited: Credited, evaluation: Evaluation, *, edges: Edges, velocity: State, reference: State | None
) -> LossInputs:
    state, sigma, cap = evaluation.state, evaluation.sigma, credited.tree.sigma_cap
    assert state is not None  # of what is trained on
    assert edges.next_state is not None
    assert edges.log_prob is not None
    mean, std = edge_transition(edges, sigma, state, velocity, cap)
    return LossInputs(
        log_prob=log_prob(edges.next_state, mean, std, edges.move.kernel.log_prob),
        old_log_prob=edges.log_prob,
        advantage=credited.of_edges(edges.nodes).to(edges.log_prob, non_blocking=True),
        mean=mean,
        std=std,
        step_size=sigma - edges.sigma_next,
        velocity=None if reference is None else edges.gather(velocity),
        diffuses=edges.move.kernel.diffuses,
        old_mean=edges.mean,
        reference_mean=None if reference is None else edge_transition(edges, sigma, state, reference, cap)[0],
        reference_velocity=None if reference is None else edges.gather(reference),
    )
