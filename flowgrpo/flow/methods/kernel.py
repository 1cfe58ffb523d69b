"""Options of the kernels: how one step moves."""

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

    Each round rolls out the groups of one iteration and counts the gains of each step by sign. Where nearly as many are
    above 0 as below, the noise rises; elsewhere it falls by as much. Step and difference are the paper's. It does not give
    the number of rounds, their trajectories or the starting levels.
    """

    rounds: int = Field(10, ge=1)
    """Rollouts before training."""
    step: Positive = 0.01
    """By which the noise g of a step rises or falls in a round; g is the std over the root of the step's size."""
    difference: Positive = 2
    """It rises where the numbers of gains above and below 0 differ by fewer than so many."""


class Stochastic(Choice):
    """Options of every stochastic kernel; see `samplers.kernels`."""

    log_prob: Literal["mean", "sum", "constant_free"] = "mean"
    """Form of the log-probability: mean over the latent's dimensions, sum (the true joint), or constant_free (CPS')."""
    calibrate: Calibration | None = None
    """Search the levels before training (DenseGRPO); null: take them as they are."""
    if TYPE_CHECKING:
        level: float | list[float]  # each kernel gives bounds and a default

    def kernels(self, num_steps: int, levels: Sequence[float] | None = None) -> tuple[Kernel, ...]:
        """Return the kernel of each step; raise InputError if there are not as many (calibrated) levels as steps."""
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


class Ode(Choice):
    """No noise: the probability flow, for rollouts that train on final samples (likelihood elbo)."""

    log_prob: ClassVar[str] = "mean"  # not used
    calibrate: ClassVar[None] = None

    name: Literal["ode"] = "ode"
    solver: Literal["euler", "dpm2", "unipc"] = "euler"
    """euler; or a multistep solver of diffusers, dpm2 (DPM-Solver++ of second order) or unipc, at one evaluation a step."""

    def kernels(self, num_steps: int, levels: Sequence[float] | None = None) -> tuple[Kernel, ...]:
        """Return the kernel of each step."""
        return (kernels.ODE,) * num_steps


Levels = Positive | Annotated[list[Positive], Field(min_length=1)]
UnitLevel = Annotated[float, Field(gt=0, le=1)]
UnitLevels = UnitLevel | Annotated[list[UnitLevel], Field(min_length=1)]


class FlowSDE(Stochastic):
    """Flow-GRPO's reverse SDE."""

    name: Literal["flow_sde"] = "flow_sde"
    level: Levels = DEFAULT_LEVELS["flow_sde"]
    """Noise level, or one for each step."""


class DanceSDE(Stochastic):
    """DanceGRPO's reverse SDE of constant diffusion."""

    name: Literal["dance_sde"] = "dance_sde"
    level: Levels = DEFAULT_LEVELS["dance_sde"]
    """Noise level, or one for each step."""


class Preserving(Stochastic):
    """Options of kernels that keep the coefficients of the flow; a level is at most 1.

    Their noise shrinks with sigma, so averaged log-probabilities near the data would outweigh all others.
    """

    log_prob: Literal["mean", "sum", "constant_free"] = "constant_free"
    """Form of the log-probability: mean over the latent's dimensions, sum (the true joint), or constant_free (CPS')."""


class CPS(Preserving):
    """Coefficients-preserving sampling: clean pictures, but it does not tend to the model's own distribution."""

    name: Literal["cps"] = "cps"
    level: UnitLevels = DEFAULT_LEVELS["cps"]
    """Noise level, at most 1, or one for each step."""


class DDIMSDE(Preserving):
    """Stepwise-Flow-GRPO's DDIM-inspired SDE: as `cps`, with less noise at early steps; the level is DDIM's eta."""

    name: Literal["ddim_sde"] = "ddim_sde"
    level: UnitLevels = DEFAULT_LEVELS["ddim_sde"]
    """DDIM's eta, at most 1, or one for each step."""


class Manifold(Stochastic):
    """SAGE-GRPO's SDE: the variance of its noise is integrated over the step."""

    name: Literal["manifold"] = "manifold"
    level: Levels = DEFAULT_LEVELS["manifold"]
    """Noise level, or one for each step."""
