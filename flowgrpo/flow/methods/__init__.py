"""The seven axes of a method, and the choices on each: their options, defaults and mathematics."""

from __future__ import annotations

from collections.abc import Mapping

from flowgrpo.flow.methods.credit.nested_sets import Nested
from flowgrpo.flow.methods.credit.rules import Depthwise, DiscountedValue, Siblings, StepGain, Terminal
from flowgrpo.flow.methods.hints import NoHints, Noised
from flowgrpo.flow.methods.kernel_options import CPS, DDIMSDE, DanceSDE, FlowSDE, Manifold, Ode
from flowgrpo.flow.methods.likelihood import Elbo, Trajectory
from flowgrpo.flow.methods.objectives.matching import (
    Centred,
    Contrast,
    Distill,
    Gradient,
    GroupSigmoid,
    PairPreference,
    PlackettLuce,
    Proximal,
    Regression,
    SemiPolicy,
    TwoBranch,
    VelocityTarget,
)
from flowgrpo.flow.methods.objectives.path_objectives import PrefixRatio, TrajectoryRatio
from flowgrpo.flow.methods.objectives.policy_gradient import Clip, KlMask, NormalisedRatio, PolicyGradient, SoftGate
from flowgrpo.flow.methods.trees.adaptive import Adaptive
from flowgrpo.flow.methods.trees.custom_tree import Custom
from flowgrpo.flow.methods.trees.tree import Branch, BranchWindow, Brush, Chain, Twigs, Window
from flowgrpo.schema.base import Choice, named
from flowgrpo.training.advantages.past_baselines import BASELINES

OBJECTIVES: Mapping[str, type[PolicyGradient]] = named(
    Clip,
    NormalisedRatio,
    SoftGate,
    PrefixRatio,
    TrajectoryRatio,
    KlMask,
    Gradient,
    Proximal,
    TwoBranch,
    VelocityTarget,
    Centred,
    PairPreference,
    SemiPolicy,
    GroupSigmoid,
    PlackettLuce,
    Regression,
    Contrast,
    Distill,
)

CHOICES: Mapping[str, Mapping[str, type[Choice]]] = {
    "tree": named(Chain, Window, Brush, Adaptive, Branch, BranchWindow, Twigs, Custom),
    "kernel": named(FlowSDE, DanceSDE, CPS, DDIMSDE, Manifold, Ode),
    "hints": named(NoHints, Noised),
    "likelihood": named(Trajectory, Elbo),
    "credit": named(Terminal, Siblings, Depthwise, Nested, StepGain, DiscountedValue),
    "baseline": BASELINES,
    "objective": OBJECTIVES,
}

QUESTIONS: Mapping[str, str] = {
    "tree": "which latents are visited?",
    "kernel": "how does one step move?",
    "hints": "what helps a group that fails?",
    "likelihood": "of what, the steps or the final sample?",
    "credit": "which edge earned the reward?",
    "baseline": "compared with what?",
    "objective": "how does the policy move?",
}
"""The question that each axis answers."""
