"""The five axes: every choice a method can make, with its options and their defaults.

A choice is a small configuration and the one call that builds what it names. Mathematics lives in the modules called.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from flowgrpo import advantage, credit, objectives
from flowgrpo.errors import InputError
from samplers import noise, plans, schedule
from samplers.kernels import Kernel as Step
from samplers.trees import Plan, Tree


class Strict(BaseModel):
    """A configuration that takes nothing it does not know."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Choice(Strict):
    """One word of an axis."""

    name: str


# tree: which latents are visited?


class Rooted(Choice):
    """Options of every tree: `start` draws an initial noise per sample or shares one in a group."""

    start: Literal["independent", "shared"] = "independent"
    last_step: Literal["ode", "sde"] = "ode"

    def _end(self, kernel: Step, num_steps: int) -> int:
        if self.last_step == "sde" and kernel.name == "cps":
            raise InputError("algorithm.tree.last_step: cps has no noise at the last step, take ode")
        return num_steps if self.last_step == "sde" else num_steps - 1


class Chain(Rooted):
    """Chains that are stochastic at every step but the last; a random `train_fraction` of those steps is trained.

    DanceGRPO draws the trained steps per sample; here they are drawn per iteration and shared by all samples, so that an
    evaluation is trained whole and the rollout's log-probabilities are met exactly.
    """

    name: Literal["chain"] = "chain"
    train_fraction: float = Field(1.0, gt=0, le=1)

    def plan(self, kernel: Step, num_steps: int, seed: int, iteration: int) -> Plan:
        """The plan of one iteration."""
        steps = range(self._end(kernel, num_steps))
        if not steps:
            raise InputError("algorithm.tree: a chain needs two steps or more, or last_step: sde")
        trained = schedule.random_steps(steps, self.train_fraction, noise.generator(seed, "trained steps", iteration))
        return plans.chain(kernel, steps, steps if self.train_fraction == 1 else trained)


class Window(Rooted):
    """Chains that are stochastic, and trained, inside a window of `size` neighbouring steps only, and ODE outside it.

    `move: random` draws its place each iteration (Flow-GRPO-Fast); `sliding` advances it by `stride` steps each `every`
    iterations (MixGRPO). `steps` = [first, end) bounds it; by default the first half for a random window, and all
    steps but the deterministic last for a sliding one.
    """

    name: Literal["window"] = "window"
    size: int = Field(3, ge=1)
    move: Literal["random", "sliding"] = "random"
    steps: list[int] | None = Field(None, min_length=2, max_length=2)
    every: int = Field(25, ge=1)
    stride: int = Field(1, ge=1)

    def plan(self, kernel: Step, num_steps: int, seed: int, iteration: int) -> Plan:
        """The plan of one iteration."""
        end = self._end(kernel, num_steps)
        first, stop = self.steps or (0, max(num_steps // 2, self.size) if self.move == "random" else end)
        if not 0 <= first <= stop - self.size <= end - self.size:
            raise InputError(
                f"algorithm.tree.size: a window of {self.size} does not fit into steps {first} to {stop} of the "
                f"{end} stochastic ones, take at most {max(1, min(stop, end) - first)}"
            )
        if self.move == "random":
            window = schedule.random_window(self.size, first, stop, noise.generator(seed, "window", iteration))
        else:
            window = schedule.sliding_window(self.size, first, stop, iteration, self.every, self.stride)
        return plans.chain(kernel, window, window)


# kernel: how does one step move?


class Stochastic(Choice):
    """Options of every stochastic kernel: its noise `level`, and the form of `log_prob` (see `samplers.kernels`)."""

    log_prob: Literal["mean", "sum", "constant_free"] = "mean"

    def kernel(self) -> Step:
        """The kernel with its level."""
        return Step(self.name, self.level, self.log_prob)


class FlowSDE(Stochastic):
    """Flow-GRPO's reverse SDE."""

    name: Literal["flow_sde"] = "flow_sde"
    level: float = Field(0.7, gt=0)


class DanceSDE(Stochastic):
    """DanceGRPO's reverse SDE of constant diffusion."""

    name: Literal["dance_sde"] = "dance_sde"
    level: float = Field(0.3, gt=0)


class CPS(Stochastic):
    """Coefficients-preserving sampling: clean pictures, but it does not tend to the model's own distribution."""

    name: Literal["cps"] = "cps"
    level: float = Field(0.8, gt=0, le=1)


# credit: which edge earned the reward?


class Terminal(Choice):
    """The reward of the end goes to every edge that led there."""

    name: Literal["terminal"] = "terminal"

    def units(self, tree: Tree, rewards: torch.Tensor) -> credit.Units:
        """The units of a scored tree."""
        return credit.terminal(tree, rewards)


# baseline: compared with what?


class Baseline(Choice):
    """Options of every baseline: what scales the deviation, and the bound on what results."""

    eps: float = Field(1e-4, ge=0)
    ddof: Literal[0, 1] = 0
    clip: float = Field(5.0, gt=0)

    def advantages(self, values: torch.Tensor, comparison: torch.Tensor) -> torch.Tensor:
        """Advantages (U,) of values (U,) within their sets."""
        function = getattr(advantage, self.name)
        return function(values, comparison, self.std, self.eps, self.ddof).clamp(-self.clip, self.clip)


class GroupMean(Baseline):
    """The mean of the set."""

    name: Literal["group_mean"] = "group_mean"
    std: Literal["group", "global", "none"] = "group"


class LeaveOneOut(Baseline):
    """The mean of the others of the set."""

    name: Literal["leave_one_out"] = "leave_one_out"
    std: Literal["group", "global", "none"] = "none"


# objective: how does the policy move?


Bound = Annotated[float, Field(gt=0)]


class Divergence(Strict):
    """A pull to the reference: `beta` times the form of KL (see `flowgrpo.objectives`); 0 computes no reference."""

    form: Literal["flow_grpo", "exact", "velocity"] = "flow_grpo"
    beta: float = Field(0.0, ge=0)


class Clip(Choice):
    """PPO's clipped ratio. `clip_range` is one bound for both sides, or [low, high]."""

    name: Literal["clip"] = "clip"
    clip_range: Bound | Annotated[list[Bound], Field(min_length=2, max_length=2)] = 1e-4
    kl: Divergence = Divergence()

    @property
    def _range(self) -> tuple[float, float]:
        return tuple(self.clip_range) if isinstance(self.clip_range, list) else (self.clip_range, self.clip_range)

    def loss(self, terms: objectives.Terms) -> torch.Tensor:
        """Loss (E,) of the edges, without the divergence."""
        return objectives.clipped_ratio(terms, *self._range)

    def clipped(self, terms: objectives.Terms) -> torch.Tensor:
        """Which edges (E,) the clip stops."""
        return objectives.clipped(terms, *self._range)

    def divergence(self, terms: objectives.Terms) -> torch.Tensor:
        """KL (E,) from the reference in the chosen form."""
        return objectives.KL[self.kl.form](terms)


CHOICES: dict[str, dict[str, type[Choice]]] = {
    axis: {choice.model_fields["name"].default: choice for choice in choices}
    for axis, choices in {
        "tree": (Chain, Window),
        "kernel": (FlowSDE, DanceSDE, CPS),
        "credit": (Terminal,),
        "baseline": (GroupMean, LeaveOneOut),
        "objective": (Clip,),
    }.items()
}
