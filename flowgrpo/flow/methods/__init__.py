"""The six axes: every choice a method can make, with its options, their defaults and, beside it, its mathematics."""

from __future__ import annotations

from flowgrpo.flow.methods.adaptive import Adaptive
from flowgrpo.flow.methods.credit import Depthwise, DiscountedValue, Siblings, StepGain, Terminal
from flowgrpo.flow.methods.custom import Custom
from flowgrpo.flow.methods.distill import Distill
from flowgrpo.flow.methods.kernel import CPS, DDIMSDE, DanceSDE, FlowSDE, Manifold, Ode
from flowgrpo.flow.methods.kl_mask import KlMask
from flowgrpo.flow.methods.likelihood import Elbo, Trajectory
from flowgrpo.flow.methods.matching import (
    Centred,
    Gradient,
    GroupSigmoid,
    PairPreference,
    PlackettLuce,
    Proximal,
    SemiPolicy,
    TwoBranch,
    VelocityTarget,
)
from flowgrpo.flow.methods.nested import Nested
from flowgrpo.flow.methods.objective import Clip, NormalisedRatio, SoftGate
from flowgrpo.flow.methods.prefix import PrefixRatio
from flowgrpo.flow.methods.tree import Branch, BranchWindow, Brush, Chain, Twigs, Window
from flowgrpo.schema.base import Choice, named
from flowgrpo.training.baseline import BASELINES

CHOICES: dict[str, dict[str, type[Choice]]] = {
    "tree": named(Chain, Window, Brush, Adaptive, Branch, BranchWindow, Twigs, Custom),
    "kernel": named(FlowSDE, DanceSDE, CPS, DDIMSDE, Manifold, Ode),
    "likelihood": named(Trajectory, Elbo),
    "credit": named(Terminal, Siblings, Depthwise, Nested, StepGain, DiscountedValue),
    "baseline": BASELINES,
    "objective": named(
        Clip,
        NormalisedRatio,
        SoftGate,
        PrefixRatio,
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
        Distill,
    ),
}
