"""Which edge earned the reward?"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from flowgrpo import credit
from flowgrpo.schema.base import Choice
from flowgrpo.training import baseline
from samplers.trees import Tree


class Terminal(Choice):
    """The reward of the end goes to every edge that led there."""

    name: Literal["terminal"] = "terminal"

    def units(self, tree: Tree, rewards: torch.Tensor, reward_weights: torch.Tensor) -> baseline.Units:
        """The units of a scored tree."""
        return credit.terminal(tree, rewards)


class Siblings(Choice):
    """The reward of a branch's end goes to the edge that began it; compared with its siblings, or all of its step."""

    name: Literal["siblings"] = "siblings"
    within: Literal["seed", "prompt"] = "seed"

    def units(self, tree: Tree, rewards: torch.Tensor, reward_weights: torch.Tensor) -> baseline.Units:
        """The units of a scored tree."""
        return credit.siblings(tree, rewards, self.within)


class Depthwise(Choice):
    """The fused reward of the leaves below a node goes to the edge above it; compared within its depth."""

    name: Literal["depthwise"] = "depthwise"
    weights: Literal["uniform", "path"] = "uniform"
    beta: float = Field(1.0, ge=0)

    def units(self, tree: Tree, rewards: torch.Tensor, reward_weights: torch.Tensor) -> baseline.Units:
        """The units of a scored tree."""
        return credit.depthwise(tree, rewards, self.weights, self.beta)


class StepGain(Choice):
    """What a step changed of the value goes to it; compared within its step, or jointly over all steps."""

    name: Literal["step_gain"] = "step_gain"
    compare: Literal["step", "joint"] = "step"

    def units(self, tree: Tree, rewards: torch.Tensor, reward_weights: torch.Tensor) -> baseline.Units:
        """The units of a scored tree."""
        return credit.step_gain(tree, rewards, self.compare)


class DiscountedValue(Choice):
    """The discounted value to come, with an absolute anchor (VGPO, reconstructed)."""

    name: Literal["discounted_value"] = "discounted_value"
    discount: float = Field(0.9, ge=0, le=1)
    anchor: float = Field(0.1, ge=0)
    anchored_steps: int = Field(5, ge=0)

    def units(self, tree: Tree, rewards: torch.Tensor, reward_weights: torch.Tensor) -> baseline.Units:
        """The units of a scored tree."""
        return credit.discounted_value(tree, rewards, reward_weights, self.discount, self.anchor, self.anchored_steps)
