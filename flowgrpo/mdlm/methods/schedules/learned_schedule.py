"""Co-GRPO, *reconstructed*: settings of the decoder are drawn as actions of a second policy.

This follows the abstract of Co-GRPO (arXiv 2512.22288) and secondary texts. They say: at each step an action holds
the ratio of masks that stay, the temperatures of tokens and of their selection, and the guidance scale. The probability
of an answer is that of its tokens times that of its actions, and the same advantage trains both. The distribution of the
actions is ours: each is normal before a sigmoid maps it into its bounds. Its mean and std depend on the step only.

All actions are drawn before a decode: `decode(predictor, prompt, apply_actions(decoder, policy.draw(seeds)), seeds)`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from flowgrpo.mdlm.decoding.decode import Decoder, Rollout
from flowgrpo.mdlm.decoding.rules.commit_rules import Remaining
from flowgrpo.mdlm.decoding.rules.logit_modifiers import Gumbel
from flowgrpo.mdlm.decoding.tokens.step import DecodeStep
from flowgrpo.mdlm.methods.schedules.schedule_actions import BOUNDS, check_action, check_start
from samplers.noise import Address, noise

Tensor = torch.Tensor


@dataclass(frozen=True)
class Actions:
    """The actions of a schedule for B answers: the values of A decoder settings at each of S steps."""

    names: tuple[str, ...]  # of the A numbers
    raw: Tensor  # (B, S, A) before the sigmoid
    values: Tensor  # (B, S, A) float64, within their bounds, as a decoder takes them
    log_prob: Tensor  # (B, S) log-density of the raw numbers


@dataclass(frozen=True)
class Chosen:
    """A decoder setting that reads an action: `values` (B, S) by row and step; the last one stays after step S - 1."""

    values: Tensor

    def __call__(self, step: DecodeStep) -> Tensor:
        """Return the setting's value (R,) for each row of a step."""
        values = self.values.to(step.row.device)
        return values[step.row, step.index.clamp(max=values.shape[1] - 1)]


class SchedulePolicy(torch.nn.Module):
    """A normal distribution of each action at each step; its parameters are `mean` and `log_std`, both (S, A)."""

    def __init__(self, start: Mapping[str, float | Sequence[float]], steps: int, std: float = 0.3):
        """Start with a distribution around `start`, over at most `steps` steps.

        `start` maps names of `BOUNDS` to a number within the bounds, or to one for each step; `std` is the standard
        deviation before the sigmoid. Raises InputError for other names or numbers.
        """
        super().__init__()
        check_start(start, steps)
        means = []
        for name, numbers in start.items():
            low, high = BOUNDS[name]
            numbers = torch.as_tensor(numbers, dtype=torch.float32).expand(steps)
            means.append(((numbers - low) / (high - low)).logit())
        self.names = tuple(start)
        self.mean = torch.nn.Parameter(torch.stack(means, dim=1))
        self.log_std = torch.nn.Parameter(torch.full_like(self.mean, math.log(std)))

    @torch.no_grad()
    def draw(self, seeds: Sequence[Address]) -> Actions:
        """Draw a schedule for each answer from its own address."""
        normal = torch.stack([noise(self.mean.shape, seed, "schedule") for seed in seeds]).to(self.mean)
        return self._actions(self.mean + self.log_std.exp() * normal)

    @torch.no_grad()
    def typical(self, count: int) -> Actions:
        """Return the median of each action at each step, the same for each of `count` answers."""
        return self._actions(self.mean.expand(count, -1, -1))

    def _actions(self, raw: Tensor) -> Actions:
        low, high = torch.tensor([BOUNDS[name] for name in self.names], dtype=torch.float64, device=raw.device).T
        values = low + (high - low) * raw.double().sigmoid()
        return Actions(self.names, raw, values, self.log_prob(raw))

    def log_prob(self, raw: Tensor) -> Tensor:
        """Return the log-density (B, S) of raw actions (B, S, A), with gradient.

        The sigmoid adds a term without parameters, so ratios are those of the actions themselves.
        """
        return torch.distributions.Normal(self.mean, self.log_std.exp()).log_prob(raw).sum(-1)


def apply_actions(decoder: Decoder, actions: Actions) -> Decoder:
    """Return the decoder with settings replaced by actions; raise InputError if it lacks the setting of an action."""
    for column, name in enumerate(actions.names):
        check_action(name, decoder)
        chosen = Chosen(actions.values[:, :, column])
        if name == "temperature":
            decoder = replace(decoder, proposal=decoder.proposal.model_copy(update={"temperature": chosen}))
        elif name == "cfg_scale":
            decoder = replace(decoder, cfg_scale=chosen)
        elif name == "ratio":
            committer = decoder.committer
            assert isinstance(committer, Remaining), "check_action refuses others"
            decoder = replace(decoder, committer=committer.model_copy(update={"ratio": chosen}))
        else:
            changes = (
                Gumbel(temperature=chosen) if isinstance(change, Gumbel) else change for change in decoder.modifiers
            )
            decoder = replace(decoder, modifiers=tuple(changes))
    return decoder


def actions_taken(rollout: Rollout, actions: Actions) -> Tensor:
    """Return which actions (B, S) bool were used: those of the steps that a row took."""
    return torch.arange(actions.log_prob.shape[1], device=rollout.steps.device) < rollout.steps[:, None]
