"""The shapes of an adaptive tree during a run: the spread of each step's rewards decides its number of children.

The gradient from a step's K children has the variance weight^2 x pull^2 x s^2 / (K - 1). Here s is the std of the
siblings' rewards, pull is `samplers.kernels.pull` of the step, and weight is the objective's weight of the step.
`neyman` (`methods.trees.adaptive`) makes the sum of these variances small within the budget, as if all dimensions of
the velocity's gradient weighed alike. The shape of an iteration must not depend on its own rewards, or its estimates
would be biased. So s comes from earlier iterations, whose weight halves every `train.half_life` iterations. With stale
rollouts the shape is chosen `run.staleness` iterations earlier, so that processes that roll out ahead know it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flowgrpo.errors import InputError
from flowgrpo.flow.config import Algorithm, Config
from flowgrpo.flow.methods import Adaptive
from flowgrpo.training.advantages.baseline import weighted_sum
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.run.run_files import is_number

Tensor = torch.Tensor


def sibling_squares(values: Tensor, comparison: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return the squared deviations of siblings from their means, summed for each step, and the degrees of freedom.

    `values` (U,) float64 is NaN where a reward was lost. `comparison` (U, 3) has group, seed, and step of the child,
    which is its edge's step plus 1. Both results have length `steps`.
    """
    known = values.isfinite()
    values, comparison = values[known], comparison[known]
    sets, set_of_unit, sizes = comparison.unique(dim=0, return_inverse=True, return_counts=True)
    means = torch.zeros(len(sets), dtype=torch.float64).index_add(0, set_of_unit, values) / sizes
    squares, freedom = (torch.zeros(steps, dtype=torch.float64) for _ in range(2))
    squares.index_add_(0, comparison[:, 2] - 1, (values - means[set_of_unit]) ** 2)
    freedom.index_add_(0, sets[:, 2] - 1, (sizes - 1).double())
    return squares, freedom


class Shaping:
    """The shapes of the tree in a run's iterations, equal on all processes and saved in checkpoints."""

    def __init__(self, config: Config):
        self._config = config
        self.squares: list[float] = []  # decayed sums, one for each step
        self.freedom: list[float] = []
        self.shapes: dict[int, list[int]] = {}  # first iteration of a shape -> children of each step

    def algorithm(self, iteration: int) -> Algorithm:
        """Return the run's `algorithm`, with the tree in the shape of an iteration."""
        algorithm, begun = self._config.algorithm, [first for first in self.shapes if first <= iteration]
        if not begun:
            return algorithm
        tree = algorithm.tree.model_copy(update={"profile": list(self.shapes[max(begun)])})
        return algorithm.model_copy(update={"tree": tree})

    def learn(self, units: CreditUnits, reward_weights: Tensor, sigmas: Sequence[float], iteration: int) -> None:
        """Add the rewards of an iteration; if a new shape is due, choose it. `units` are those of all processes."""
        algorithm, train = self._config.algorithm, self._config.train
        tree = algorithm.tree
        assert isinstance(tree, Adaptive)
        kernels = algorithm.kernel.kernels(len(sigmas) - 1)
        steps = len(tree.costs(kernels))
        squares, freedom = sibling_squares(weighted_sum(units.values, reward_weights), units.comparison, steps)
        decay, zeros = train.half_life.kept(1), [0.0] * steps
        self.squares, self.freedom = (
            [decay * old + new for old, new in zip(before or zeros, now.tolist(), strict=True)]
            for before, now in ((self.squares, squares), (self.freedom, freedom))
        )
        coming = iteration + 1 + self._config.run.staleness
        if coming % tree.every == 0 and any(self.squares) and all(self.freedom):
            trained_steps = [(kernels[i], sigmas[i], sigmas[i + 1]) for i in range(steps)]
            pulls = algorithm.objective.pulls(trained_steps, sigmas[1])
            variances = [
                pull**2 * square / freedom
                for pull, square, freedom in zip(pulls, self.squares, self.freedom, strict=True)
            ]
            older = max((first for first in self.shapes if first <= iteration + 1), default=0)
            self.shapes = {first: shape for first, shape in self.shapes.items() if first >= older}
            self.shapes[coming] = tree.reshape(kernels, variances)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, of JSON types."""
        shapes = {str(first): shape for first, shape in self.shapes.items()}
        return {"squares": self.squares, "freedom": self.freedom, "shapes": shapes}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restore the result of `state`; raise InputError if it is malformed."""
        saved = state or {}
        try:
            squares, freedom = ([float(x) for x in saved[key]] for key in ("squares", "freedom"))
            shapes = {int(first): [int(n) for n in shape] for first, shape in saved["shapes"].items()}
            whole = len(squares) == len(freedom) and all(map(is_number, squares + freedom))
            whole = whole and all(len(shape) == len(squares) and min(shape) >= 2 for shape in shapes.values())
        except (LookupError, TypeError, ValueError, AttributeError):
            whole = False
        if not whole:
            raise InputError(
                "run.resume: the checkpoint holds no shapes of a tree that adapts; begin again with another run.name"
            )
        self.squares, self.freedom, self.shapes = squares, freedom, shapes
