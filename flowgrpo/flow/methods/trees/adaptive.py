"""The tree that chooses the children of each step anew during a run, by the spread of their rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.flow.methods.trees.tree import Finish, Rooted, divided
from flowgrpo.schema.imports.lazy import lazy

if TYPE_CHECKING:
    from samplers import plans
    from samplers.kernels import Kernel
    from samplers.trees import Plan
else:
    plans = lazy("samplers.plans")

LEAST = 2  # children of a step: without siblings its spread could not be estimated again


def neyman(variances: Sequence[float], costs: Sequence[float], budget: float) -> list[int]:
    """Return the number of children of each step that makes the sum of variance / (children - 1) small within a budget.

    Neyman's allocation (J. R. Stat. Soc. 97, 1934): children - 1 in proportion to sqrt(variance / cost). From `LEAST` at
    each step, children are added one by one where they reduce the sum most for their cost, the earliest of equal steps
    first. Variances are of the estimate from two children; the budget holds at least `LEAST` children of each step.
    """
    counts, budget_left = [LEAST] * len(costs), budget - LEAST * sum(costs)

    def worth(step: int) -> float:
        return variances[step] / (counts[step] * (counts[step] - 1) * costs[step])

    while fitting := [step for step, cost in enumerate(costs) if cost <= budget_left and variances[step] > 0]:
        chosen = max(fitting, key=worth)
        counts[chosen] += 1
        budget_left -= costs[chosen]
    return counts


def check(algorithm: Any) -> None:
    """Refuse axes whose expected update would depend on the numbers of children, by an InputError."""
    credit, baseline = algorithm.credit, algorithm.baseline
    if credit.name != "siblings" or credit.weights != "steps":
        choice = credit.name if credit.name != "siblings" else "siblings with weights: edges"
        raise InputError(
            f"algorithm.credit: the tree adaptive has other numbers of children at each step, by which {choice} would weigh "
            "steps; take '{name: siblings, weights: steps}'"
        )
    if baseline.name != "leave_one_out" or baseline.std not in ("none", "global"):
        choice = baseline.name if baseline.name != "leave_one_out" else f"leave_one_out with std: {baseline.std}"
        raise InputError(
            f"algorithm.baseline: the tree adaptive has other numbers of children at each step, by which {choice} would "
            "scale their advantages; take '{name: leave_one_out, std: global}', or std: none"
        )


class Adaptive(Rooted):
    """A brush whose numbers of children follow the spread of the run's own sibling rewards (ours).

    See `flow.rollouts.adaptive_tree`. A group of size S has S / `branches` seeds, and its first shape is the brush of
    `branches`. Later shapes cost at most as many evaluations: children go where their rewards differ most for their cost,
    but every step has at least two. The credit weighs steps alike, so that the expected update stays the same.
    """

    adapts: ClassVar[bool] = True

    name: Literal["adaptive"] = "adaptive"
    branches: int = Field(6, ge=3)
    """Children of each step at first, whose cost is the budget of all later shapes; 2 would leave nothing to move."""
    profile: list[Annotated[int, Field(ge=LEAST)]] | None = Field(None, min_length=1)
    """Children of each stochastic step at first, instead of branches; null: branches at all."""
    every: int = Field(5, ge=1)
    """Iterations after which the numbers are chosen anew; train.half_life says how long rewards count in that."""
    sample_cost: float = Field(0.0, ge=0)
    """What decoding and scoring a sample costs beside a model evaluation; 0 counts evaluations alone."""
    finish: Finish | None = None
    """How a branch is finished by ODE: a number bounds the steps, and a map has more; null: all that remain."""

    @override
    def roots(self, group_size: int) -> int:
        return divided(group_size, self.branches, "algorithm.tree.branches children of each seed")

    @override
    def plan(self, kernels: Sequence[Kernel], group_size: int, seed: int, iteration: int) -> Plan:
        profile = self.first(kernels)
        return plans.brush(kernels, [*profile, *[0] * (len(kernels) - len(profile))], self._steps)

    def first(self, kernels: Sequence[Kernel]) -> list[int]:
        """Return the children of each stochastic step before any reward is known."""
        costs = self.costs(kernels)
        if self.profile is not None and len(self.profile) != len(costs):
            raise InputError(
                f"algorithm.tree.profile: {self.profile} are {len(self.profile)} numbers of children, and there are "
                f"{len(costs)} stochastic steps"
            )
        if not all(costs):
            raise InputError(
                "algorithm.tree.sample_cost: a child of the last step takes no evaluation, so that it would have children "
                "without end; take more than 0, or last_step: ode"
            )
        return self.profile or [self.branches] * len(costs)

    def costs(self, kernels: Sequence[Kernel]) -> list[float]:
        """Return the cost of a child of each stochastic step, in model evaluations, plus the sample's own."""
        steps = len(kernels)
        return [min(self._steps or steps, steps - 1 - step) + self.sample_cost for step in range(self._end(kernels))]

    def reshaped(self, kernels: Sequence[Kernel], variances: Sequence[float]) -> list[int]:
        """Return the children of each stochastic step, for the cost of the first shape; `variances` as in `neyman`."""
        costs = self.costs(kernels)
        return neyman(variances, costs, sum(n * cost for n, cost in zip(self.first(kernels), costs, strict=True)))

    @property
    def _steps(self) -> int | None:
        return None if self.finish is None else self.finish.steps

    def widest(self, kernels: Sequence[Kernel]) -> Adaptive:
        """Return the tree in the shape with the most samples."""
        costs = self.costs(kernels)
        only = [float(cost == min(costs)) for cost in costs]
        return self.model_copy(update={"profile": self.reshaped(kernels, only)})
