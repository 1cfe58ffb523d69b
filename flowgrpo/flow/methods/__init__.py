"""The five axes: every choice a method can make, with its options and their defaults.

A choice is a small configuration and the one call that builds what it names. Mathematics lives in the modules called.
"""

from __future__ import annotations

from flowgrpo.flow.methods.credit import Depthwise, DiscountedValue, Siblings, StepGain, Terminal
from flowgrpo.flow.methods.kernel import CPS, DDIMSDE, DanceSDE, FlowSDE, Manifold
from flowgrpo.flow.methods.objective import Clip, NormalisedRatio, SoftGate
from flowgrpo.flow.methods.tree import Branch, BranchWindow, Brush, Chain, Custom, Twigs, Window
from flowgrpo.schema.base import Choice, Strict
from flowgrpo.training.baseline import Absolute, GroupMean, LeaveOneOut, Median, Tracker

__all__ = ["CHOICES", "Choice", "Strict"]

CHOICES: dict[str, dict[str, type[Choice]]] = {
    axis: {choice.model_fields["name"].default: choice for choice in choices}
    for axis, choices in {
        "tree": (Chain, Window, Brush, Branch, BranchWindow, Twigs, Custom),
        "kernel": (FlowSDE, DanceSDE, CPS, DDIMSDE, Manifold),
        "credit": (Terminal, Siblings, Depthwise, StepGain, DiscountedValue),
        "baseline": (GroupMean, LeaveOneOut, Median, Tracker, Absolute),
        "objective": (Clip, NormalisedRatio, SoftGate),
    }.items()
}
