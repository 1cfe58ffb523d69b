"""The adaptive tree: the number of children of each step follows the spread of their rewards during a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.flow.methods.trees.tree import Finish, Rooted
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.training.distributed.minibatches import count_roots

if TYPE_CHECKING:
    from samplers import plans
    from samplers.kernels import Kernel
    from samplers.trees import Plan
else:
    plans = lazy("samplers.plans")

LEAST = 2  # fewest children of a step; with one child its spread could not be estimated


def neyman(variances: Sequence[float], costs: Sequence[float], budget: float) -> list[int]:
    """Return the numbers of children that make the sum over steps of variance / (children - 1) small within a budget.

    Neyman's allocation (J. R. Stat. Soc. 97, 1934) has children - 1 in proportion to sqrt(variance / cost). Here each
    step starts with `LEAST` children. More are added one by one, each at the step where it reduces the sum most for its
    cost; of equal steps the earliest one wins. `variances` has for each step the variance with two children.
    The budget must pay for `LEAST` children at each step.
    """
    counts, budget_left = [LEAST] * len(costs), budget - LEAST * sum(costs)

    def gain_per_cost(step: int) -> float:
        return variances[step] / (counts[step] * (counts[step] - 1) * costs[step])

    while fitting := [step for step, cost in enumerate(costs) if cost <= budget_left and variances[step] > 0]:
        chosen = max(fitting, key=gain_per_cost)
        counts[chosen] += 1
        budget_left -= costs[chosen]
    return counts


def check(algorithm: Any) -> None:
    """Raise InputError if the credit or the baseline makes the expected update depend on the numbers of children."""
    credit, baseline = algorithm.credit, algorithm.baseline
    if credit.name != "siblings" or credit.weights != "steps":
        choice = credit.name if credit.name != "siblings" else "siblings with weights: edges"
        raise InputError(
            f"algorithm.credit: the tree adaptive has a different number of children at each step, and {choice} would "
            "weigh steps by it; take '{name: siblings, weights: steps}'"
        )
    if baseline.name != "leave_one_out" or baseline.std not in ("none", "global"):
        choice = baseline.name if baseline.name != "leave_one_out" else f"leave_one_out with std: {baseline.std}"
        raise InputError(
            f"algorithm.baseline: the tree adaptive has a different number of children at each step, and {choice} "
            "would scale advantages by it; take '{name: leave_one_out, std: global}', or std: none"
        )


class Adaptive(Rooted):
    """A brush whose numbers of children follow the spread of the run's own sibling rewards (ours).

    See `flow.rollouts.adaptive_tree`. A group of size S has S / `branches` seeds. The first shape is the brush with
    `branches` children at each step. Later shapes cost no more evaluations; they give more children to the steps with
    the largest spread of rewards for their cost, but every step keeps at least two. The credit gives every step the
    same weight, so that the expected update stays the same.
    """

    adapts: ClassVar[bool] = True

    name: Literal["adaptive"] = "adaptive"
    branches: int = Field(6, ge=3)
    """Children of each step at first. Their cost is the budget of all later shapes; 2 would allow no other shape."""
    profile: list[Annotated[int, Field(ge=LEAST)]] | None = Field(None, min_length=1)
    """First numbers of children of the stochastic steps, instead of branches; null: branches at each step."""
    every: int = Field(5, ge=1)
    """Iterations between two choices of the numbers; the weight of rewards halves every train.half_life iterations."""
    sample_cost: float = Field(0.0, ge=0)
    """Cost of decoding and scoring a sample, in model evaluations; 0 counts evaluations alone."""
    finish: Finish | None = None
    """How ODE steps finish a branch: a number bounds these steps, a map sets more; null: all the remaining steps."""

    @override
    def roots(self, group_size: int) -> int:
        return count_roots(group_size, self.branches, "algorithm.tree.branches children of each seed")

    @override
    def plan(self, kernels: Sequence[Kernel], group_size: int, seed: int, iteration: int) -> Plan:
        profile = self.first(kernels)
        return plans.brush(kernels, [*profile, *[0] * (len(kernels) - len(profile))], self._steps)

    def first(self, kernels: Sequence[Kernel]) -> list[int]:
        """Return the first numbers of children of the stochastic steps; raise InputError if the options do not fit."""
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
        """Return the cost of one child of each stochastic step: its model evaluations plus `sample_cost`."""
        steps = len(kernels)
        return [min(self._steps or steps, steps - 1 - step) + self.sample_cost for step in range(self._end(kernels))]

    def reshape(self, kernels: Sequence[Kernel], variances: Sequence[float]) -> list[int]:
        """Return new numbers of children of the steps, within the first shape's cost; `variances` as in `neyman`."""
        costs = self.costs(kernels)
        return neyman(variances, costs, sum(n * cost for n, cost in zip(self.first(kernels), costs, strict=True)))

    @property
    def _steps(self) -> int | None:
        return None if self.finish is None else self.finish.steps

    def widest(self, kernels: Sequence[Kernel]) -> Adaptive:
        """Return the tree in the shape with the most samples that its budget allows."""
        costs = self.costs(kernels)
        only = [float(cost == min(costs)) for cost in costs]
        return self.model_copy(update={"profile": self.reshape(kernels, only)})
