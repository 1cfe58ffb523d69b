"""The plans: which moves each method makes from a (role, step). One function per shape of tree."""

from __future__ import annotations

from collections.abc import Collection

from samplers.kernels import Kernel
from samplers.trees import Move, Plan


def chain(kernel: Kernel, stochastic: Collection[int], trained: Collection[int]) -> Plan:
    """One child per node: a step of `kernel` at the `stochastic` steps, an ODE step elsewhere.

    Flow-GRPO and DanceGRPO when all steps but the last are stochastic; Flow-GRPO-Fast and MixGRPO when only a window is.

    Args:
        trained: the stochastic steps whose edges take part in the update.
    """
    return lambda role, step: (Move(kernel, trained=step in trained) if step in stochastic else Move(),)
