"""A schedule whose numbers are actions of a policy of their own: Co-GRPO, *reconstructed*.

Of Co-GRPO (arXiv 2512.22288) only the abstract and secondary texts were at hand: at each step an action holds the ratio of
masks that stay, the temperature of tokens and of their selection, and the guidance scale; the policy of an answer is that of
its tokens times that of its actions, and both are trained by the same advantage. What distribution the actions have is ours:
each is normal in a squashed space, with a mean and a std for every step that look at nothing else.

A prompt's actions are all drawn before it is decoded, and the decode is the one of the tokens given them:

    actions = policy.draw(seeds)
    rollout = decode(predictor, prompt, scheduled(build("scheduled", length, ...), actions), seeds)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Literal

import torch
from pydantic import Field

from flowgrpo.errors import InputError, nearest
from flowgrpo.mdlm.decoding.committers import Remaining
from flowgrpo.mdlm.decoding.decode import Decoder, Rollout
from flowgrpo.mdlm.decoding.modifiers import Gumbel
from flowgrpo.mdlm.decoding.step import DecodeStep
from flowgrpo.schema.base import Choice, Positive
from samplers.noise import Address, noise

Tensor = torch.Tensor

BOUNDS = MappingProxyType(
    {"ratio": (0.0, 1.0), "temperature": (0.0, 2.0), "selection_temperature": (0.0, 2.0), "cfg_scale": (0.0, 4.0)}
)


@dataclass(frozen=True)
class Actions:
    """The schedules of B answers over S steps, of A numbers each.

    Attributes:
        names: of the A numbers.
        raw: (B, S, A) before they are squashed.
        values: (B, S, A) float64, as a decoder takes them.
        log_prob: (B, S) of the raw numbers.
    """

    names: tuple[str, ...]
    raw: Tensor
    values: Tensor
    log_prob: Tensor


@dataclass(frozen=True)
class Chosen:
    """A setting that is read from actions: the number (R,) of each row at its step, the last one from the end on."""

    values: Tensor  # (B, S)

    def __call__(self, step: DecodeStep) -> Tensor:
        """Numbers (R,) of the rows of a step."""
        values = self.values.to(step.row.device)
        return values[step.row, step.index.clamp(max=values.shape[1] - 1)]


class SchedulePolicy(torch.nn.Module):
    """A normal distribution of each action at each step; its parameters are `mean` and `log_std`, both (S, A)."""

    def __init__(self, start: Mapping[str, float | Sequence[float]], steps: int, std: float = 0.3):
        """Begin around a schedule.

        Args:
            start: for each name of `BOUNDS` that is to be an action its number, or one for each step, between the bounds.
            steps: S, the most that a decode takes.
            std: of the squashed numbers' logits.

        Raises:
            InputError: a name is unknown, or a number is not between the bounds.
        """
        super().__init__()
        means = []
        for name, numbers in start.items():
            if name not in BOUNDS:
                raise InputError(f"algorithm.schedule.start.{name}: unknown action, {nearest(name, BOUNDS)}")
            low, high = BOUNDS[name]
            numbers = torch.as_tensor(numbers, dtype=torch.float32)
            if numbers.ndim and len(numbers) != steps:
                raise InputError(
                    f"algorithm.schedule.start.{name}: {len(numbers)} numbers for {steps} steps, one a token of the length"
                )
            numbers = numbers.expand(steps)
            if not ((numbers > low) & (numbers < high)).all():
                raise InputError(f"algorithm.schedule.start.{name}: its numbers are to lie between {low} and {high}")
            means.append(((numbers - low) / (high - low)).logit())
        self.names = tuple(start)
        self.mean = torch.nn.Parameter(torch.stack(means, dim=1))
        self.log_std = torch.nn.Parameter(torch.full_like(self.mean, math.log(std)))

    @torch.no_grad()
    def draw(self, seeds: Sequence[Address]) -> Actions:
        """A schedule for each answer, from its own address."""
        drawn = torch.stack([noise(self.mean.shape, seed, "schedule") for seed in seeds]).to(self.mean)
        raw = self.mean + self.log_std.exp() * drawn
        return Actions(self.names, raw, self._squashed(raw), self.log_prob(raw))

    @torch.no_grad()
    def typical(self, count: int) -> Actions:
        """The same schedule for each of some answers: the middle of the distribution."""
        raw = self.mean.expand(count, -1, -1)
        return Actions(self.names, raw, self._squashed(raw), self.log_prob(raw))

    def _squashed(self, raw: Tensor) -> Tensor:
        low, high = torch.tensor([BOUNDS[name] for name in self.names], dtype=torch.float64, device=raw.device).T
        return low + (high - low) * raw.double().sigmoid()

    def log_prob(self, raw: Tensor) -> Tensor:
        """Log-density (B, S) of raw actions (B, S, A), with gradient.

        The squashing adds a term that no parameter is in, so ratios are those of the actions themselves.
        """
        return torch.distributions.Normal(self.mean, self.log_std.exp()).log_prob(raw).sum(-1)


def scheduled(decoder: Decoder, actions: Actions) -> Decoder:
    """The decoder with its numbers taken from actions.

    Raises:
        InputError: an action belongs to nothing in the decoder.
    """
    for column, name in enumerate(actions.names):
        chosen = Chosen(actions.values[:, :, column])
        if name == "temperature":
            decoder = replace(decoder, proposal=decoder.proposal.model_copy(update={"temperature": chosen}))
        elif name == "cfg_scale":
            decoder = replace(decoder, cfg_scale=chosen)
        elif name == "ratio" and isinstance(decoder.committer, Remaining):
            decoder = replace(decoder, committer=decoder.committer.model_copy(update={"ratio": chosen}))
        elif name == "selection_temperature" and any(isinstance(change, Gumbel) for change in decoder.modifiers):
            changes = (
                Gumbel(temperature=chosen) if isinstance(change, Gumbel) else change for change in decoder.modifiers
            )
            decoder = replace(decoder, modifiers=tuple(changes))
        else:
            raise InputError(
                f"algorithm.schedule.start.{name}: the decoder has no such number, take the decoder scheduled"
            )
    return decoder


def acted(rollout: Rollout, actions: Actions) -> Tensor:
    """Which actions (B, S) bool took effect: those of the steps that a row took."""
    return torch.arange(actions.log_prob.shape[1], device=rollout.steps.device) < rollout.steps[:, None]


class Unscheduled(Choice):
    """The decoder's numbers stay as they are."""

    name: Literal["none"] = "none"

    def policy(self, steps: int) -> None:
        """There is none."""


class LearnedSchedule(Choice):
    """Co-GRPO (arXiv 2512.22288), reconstructed: numbers of the decoder are drawn, and trained by the same advantage.

    `start` has the mean of each to begin with, of all steps or of each: ratio, temperature, selection_temperature,
    cfg_scale. `std` is that of their logits.
    """

    name: Literal["learned"] = "learned"
    start: Annotated[dict[str, float | list[float]], Field(min_length=1)] = {"temperature": 0.8}
    std: Positive = 0.3
    learning_rate: Positive = 0.03

    def policy(self, steps: int) -> SchedulePolicy:
        """The distribution of the numbers, for decodes of at most so many steps."""
        return SchedulePolicy(self.start, steps, self.std)
