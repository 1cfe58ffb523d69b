"""The shape of an adaptive tree as a run goes: what its own rewards tell of each step, and the children that follow.

The gradient that a step's K children give has a variance of weight^2 x pull^2 x s^2 / (K - 1): s that of siblings' rewards,
the pull that of the step's log-probability at the velocity (`samplers.kernels.pull`), the weight the objective's. Their sum
is made small under the budget by `methods.adaptive.neyman`. The shape of an iteration is settled before any of its rewards
are seen, or its estimates would be biased: s comes from earlier iterations, each of which counts half after
`train.half_life`. Where rollouts are behind (`run.staleness`) the shape is settled as many iterations earlier, so that
processes that roll out ahead know it.

That all dimensions of the velocity's gradient weigh alike, whatever the step, is our reading: what the network makes of it
is not known before the update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flowgrpo.errors import InputError
from flowgrpo.flow.config import Algorithm, Config
from flowgrpo.flow.methods import Adaptive
from flowgrpo.training.advantages.baseline import combined
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.run.run_files import is_number

Tensor = torch.Tensor


def sibling_squares(values: Tensor, comparison: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return the squared deviations of siblings from their means, summed by step (steps,), and their degrees of freedom.

    Their quotient is the unbiased variance within a state, whatever the states' means are.

    Args:
        values: (U,) float64, NaN where a reward was lost.
        comparison: (U, 3) group, seed, and the step that a child is at, which is one more than the one it took.
    """
    known = values.isfinite()
    values, comparison = values[known], comparison[known]
    sets, own, sizes = comparison.unique(dim=0, return_inverse=True, return_counts=True)
    means = torch.zeros(len(sets), dtype=torch.float64).index_add(0, own, values) / sizes
    squares, freedom = (torch.zeros(steps, dtype=torch.float64) for _ in range(2))
    squares.index_add_(0, comparison[:, 2] - 1, (values - means[own]) ** 2)
    freedom.index_add_(0, sets[:, 2] - 1, (sizes - 1).double())
    return squares, freedom


class Shaping:
    """The shapes of a run's iterations; every process keeps the same, and a checkpoint holds it.

    Args:
        config: of a run whose tree adapts.
    """

    def __init__(self, config: Config):
        self._config = config
        self.squares: list[float] = []  # by step, decayed sums
        self.freedom: list[float] = []
        self.shapes: dict[int, list[int]] = {}  # children by step, from an iteration on

    def algorithm(self, iteration: int) -> Algorithm:
        """The axes with the tree in the shape that it has in an iteration."""
        begun = [first for first in self.shapes if first <= iteration]
        return with_shape(self._config.algorithm, self.shapes[max(begun)]) if begun else self._config.algorithm

    def learn(self, units: CreditUnits, reward_weights: Tensor, sigmas: Sequence[float], iteration: int) -> None:
        """Remember the rewards of an iteration, and settle the shape of the first whose rollout has not begun.

        Args:
            units: of all processes.
            reward_weights: (R,) of the units' columns.
            sigmas: the schedule.
        """
        algorithm, train = self._config.algorithm, self._config.train
        tree = algorithm.tree
        assert isinstance(tree, Adaptive)
        kernels = algorithm.kernel.kernels(len(sigmas) - 1)
        steps = len(tree.costs(kernels))
        found = sibling_squares(combined(units.values, reward_weights), units.comparison, steps)
        kept = 0.5 ** (1 / train.half_life)
        before = (self.squares or [0.0] * steps, self.freedom or [0.0] * steps)
        self.squares, self.freedom = (
            [kept * old + new for old, new in zip(was, now.tolist(), strict=True)]
            for was, now in zip(before, found, strict=True)
        )
        coming = iteration + 1 + self._config.run.staleness
        if coming % tree.every == 0 and any(self.squares) and all(self.freedom):
            taken = [(kernels[i], sigmas[i], sigmas[i + 1]) for i in range(steps)]
            pulls = algorithm.objective.pulls(taken, sigmas[1])
            variances = [
                pull**2 * square / freedom
                for pull, square, freedom in zip(pulls, self.squares, self.freedom, strict=True)
            ]
            older = max((first for first in self.shapes if first <= iteration + 1), default=0)
            self.shapes = {first: shape for first, shape in self.shapes.items() if first >= older}
            self.shapes[coming] = tree.reshaped(kernels, variances)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        shapes = {str(first): shape for first, shape in self.shapes.items()}
        return {"squares": self.squares, "freedom": self.freedom, "shapes": shapes}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go back to what `state` returned.

        Raises:
            InputError: it is something else.
        """
        kept = state or {}
        try:
            squares, freedom = ([float(x) for x in kept[key]] for key in ("squares", "freedom"))
            shapes = {int(first): [int(n) for n in shape] for first, shape in kept["shapes"].items()}
            whole = len(squares) == len(freedom) and all(map(is_number, squares + freedom))
            whole = whole and all(len(shape) == len(squares) and min(shape) >= 2 for shape in shapes.values())
        except (LookupError, TypeError, ValueError, AttributeError):
            whole = False
        if not whole:
            raise InputError(
                "run.resume: the checkpoint holds no shapes of a tree that adapts; begin again with another run.name"
            )
        self.squares, self.freedom, self.shapes = squares, freedom, shapes


def with_shape(algorithm: Algorithm, shape: Sequence[int]) -> Algorithm:
    """The axes with the tree in a shape: so many children of each stochastic step."""
    return algorithm.model_copy(update={"tree": algorithm.tree.model_copy(update={"profile": list(shape)})})
