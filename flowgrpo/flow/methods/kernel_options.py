"""Options of the kernels, the rules that move the latents by one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from flowgrpo.errors import InputError
from flowgrpo.schema.base import Choice, Positive, Strict
from flowgrpo.schema.imports.lazy import lazy
from samplers.levels import DEFAULT_LEVELS

if TYPE_CHECKING:
    from samplers import kernels
    from samplers.kernels import Kernel
else:
    kernels = lazy("samplers.kernels")


class Calibration(Strict):
    """DenseGRPO's search for the noise level of each step, before training (arXiv 2601.20218).

    Each round rolls out the groups of one iteration and counts the positive and the negative gains of each step. If
    the two counts are nearly equal, the step's noise rises by `step`; otherwise it falls by `step`. The defaults of
    `step` and `difference` are the paper's. The paper does not give the number of rounds, the number of trajectories or
    the first levels.
    """

    rounds: int = Field(10, ge=1)
    """Rounds before training, each of one rollout."""
    step: Positive = 0.01
    """Change of a step's noise g in one round; g is the std divided by the square root of the step size."""
    difference: Positive = 2
    """The noise rises if the counts of positive and negative gains differ by less than this."""


class KernelOptions(Choice):
    """Options of every kernel."""

    solver: Literal["euler", "dpm2"] = "euler"
    """How steps without noise are taken: by Euler's method, or by second-order DPM-Solver++, with likelihood elbo."""


class Stochastic(KernelOptions):
    """Options of every stochastic kernel; see `samplers.kernels`."""

    log_prob: Literal["mean", "sum", "constant_free"] = "mean"
    """Form of the log-probability: mean or sum over the dimensions of a latent, or constant_free (CPS's)."""
    calibrate: Calibration | None = None
    """Search the noise levels before training (DenseGRPO); null: use them as given."""
    if TYPE_CHECKING:
        level: float | list[float]  # each kernel gives bounds and a default

    def kernels(self, num_steps: int, levels: Sequence[float] | None = None) -> tuple[Kernel, ...]:
        """Return the kernel of each step; calibrated `levels` replace the config's level.

        Raise InputError unless there is one level, a level for each step, or one for each step but the last.
        """
        level = self.level if levels is None else levels
        each = [level] * num_steps if isinstance(level, float) else list(level)
        if len(each) == num_steps - 1:
            each.append(0.0)  # the last step is ODE
        if len(each) != num_steps:
            raise InputError(
                f"algorithm.kernel.level: {len(each)} levels for {num_steps} steps, take {num_steps}, or {num_steps - 1} "
                "if the last step is ODE"
            )
        return tuple(kernels.Kernel(self.name, level, self.log_prob) for level in each)


class Ode(KernelOptions):
    """Steps of the probability-flow ODE, without noise, for runs that train on final samples (likelihood elbo).

    Formula: `samplers.kernels.ode`.
    """

    log_prob: ClassVar[str] = "mean"  # not used
    calibrate: ClassVar[None] = None

    name: Literal["ode"] = "ode"

    def kernels(self, num_steps: int, levels: Sequence[float] | None = None) -> tuple[Kernel, ...]:
        """Return the kernel of each step."""
        return (kernels.ODE,) * num_steps


Levels = Positive | Annotated[list[Positive], Field(min_length=1)]
UnitLevel = Annotated[float, Field(gt=0, le=1)]
UnitLevels = UnitLevel | Annotated[list[UnitLevel], Field(min_length=1)]


class FlowSDE(Stochastic):
    """Flow-GRPO's reverse SDE. Formula: `samplers.kernels.flow_sde`."""

    name: Literal["flow_sde"] = "flow_sde"
    level: Levels = DEFAULT_LEVELS["flow_sde"]
    """Noise level of all steps, or a list of one for each step."""


class DanceSDE(Stochastic):
    """DanceGRPO's reverse SDE of constant diffusion. Formula: `samplers.kernels.dance_sde`."""

    name: Literal["dance_sde"] = "dance_sde"
    level: Levels = DEFAULT_LEVELS["dance_sde"]
    """Noise level of all steps, or a list of one for each step."""


class Preserving(Stochastic):
    """Options of kernels that keep the coefficients of the flow; a level is at most 1.

    Their noise shrinks with sigma. With log_prob mean, the steps near the data would outweigh all others.
    """

    log_prob: Literal["mean", "sum", "constant_free"] = "constant_free"
    """Form of the log-probability: mean or sum over the dimensions of a latent, or constant_free (CPS's)."""


class CPS(Preserving):
    """Coefficients-preserving sampling: clean pictures, but not the model's distribution, even with many steps.

    Formula: `samplers.kernels.cps`.
    """

    name: Literal["cps"] = "cps"
    level: UnitLevels = DEFAULT_LEVELS["cps"]
    """Noise level of all steps, at most 1, or a list of one for each step."""


class DDIMSDE(Preserving):
    """Stepwise-Flow-GRPO's DDIM-inspired SDE: like `cps`, with less noise at early steps; the level is DDIM's eta.

    Formula: `samplers.kernels.ddim_sde`.
    """

    name: Literal["ddim_sde"] = "ddim_sde"
    level: UnitLevels = DEFAULT_LEVELS["ddim_sde"]
    """DDIM's eta for all steps, at most 1, or a list of one for each step."""


class Manifold(Stochastic):
    """SAGE-GRPO's SDE, with the variance of the noise integrated over each step.

    Formula: `samplers.kernels.manifold_sde`.
    """

    name: Literal["manifold"] = "manifold"
    level: Levels = DEFAULT_LEVELS["manifold"]
    """Noise level of all steps, or a list of one for each step."""
