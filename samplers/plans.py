"""The plans: which moves each method makes from a (role, step). One function per shape of tree.

`kernels` holds the kernel of each step of the schedule, so that noise levels may differ from step to step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from samplers.kernels import Kernel
from samplers.trees import TWIG, Move, Plan

SIDE = "side"  # what left the trunk of a brush, and walks on by ODE


def chain(kernels: Sequence[Kernel], stochastic: Collection[int], trained: Collection[int]) -> Plan:
    """One child per node: a step of the kernel at the `stochastic` steps, an ODE step elsewhere.

    Flow-GRPO and DanceGRPO when all steps but the last are stochastic; Flow-GRPO-Fast and MixGRPO when only a window is.

    Args:
        trained: the stochastic steps whose edges take part in the update.
    """
    return lambda role, step: (Move(kernels[step], trained=step in trained) if step in stochastic else Move(),)


def brush(kernels: Sequence[Kernel], branches: Sequence[int], finish: int | None = None) -> Plan:
    """An ODE trunk; at step i it grows `branches[i]` stochastic, trained children, each finished by ODE.

    TempFlow-GRPO (arXiv 2508.04324). The trunk ends where it branches for the last time, for nothing comes of its end.

    Args:
        finish: most ODE steps that finish a branch; None for all that remain.
    """
    end = len(kernels)
    last = max(step for step, count in enumerate(branches) if count)

    def moves(role: str, step: int) -> tuple[Move, ...]:
        if role == SIDE:
            return (Move(role=SIDE, ode_stops=_stops(step, end, finish)),)
        sides = (Move(kernels[step], SIDE, branches[step], trained=True),) if branches[step] else ()
        return (Move(), *sides) if step < last else sides

    return moves


def branch(
    kernels: Sequence[Kernel],
    splits: Collection[int],
    factor: int,
    *,
    stochastic: Collection[int],
    trained: Collection[int],
    sibling_strength: float | None,
    noise_scale: float,
) -> Plan:
    """Every node is trunk: `factor` children at the `splits`, one elsewhere; ODE at steps that are not `stochastic`.

    BranchGRPO (arXiv 2509.06040), and with a window of stochastic steps its Mix.

    Args:
        splits: some of the stochastic steps.
        sibling_strength: of the siblings' noise, see `Move`.
        noise_scale: of the siblings' noise, see `Move`.
    """

    def moves(role: str, step: int) -> tuple[Move, ...]:
        if step in splits:
            siblings = Move(kernels[step], count=factor, trained=step in trained)
            return (replace(siblings, sibling_strength=sibling_strength, noise_scale=noise_scale),)
        return (Move(kernels[step], trained=step in trained) if step in stochastic else Move(),)

    return moves


def twigs(kernels: Sequence[Kernel], stochastic: Collection[int], length: int | None, root: bool) -> Plan:
    """Trained chains; from every node an ODE twig of `length` steps (None: all that remain) leads to a clean sample.

    DenseGRPO (all that remain), Stepwise-Flow-GRPO (5), VGPO (one jump). The first step of a twig shares the evaluation of
    its node, and where the chain itself goes the twig's way to the end there is none.

    Args:
        root: whether the start has a twig too, which a step's gain needs and a value does not.
    """
    end = len(kernels)

    def moves(role: str, step: int) -> tuple[Move, ...]:
        trunk = Move(kernels[step], trained=True) if step in stochastic else Move()
        ode_stops = _stops(step, end, length)
        coincides = len(ode_stops) == end - step and not any(later in stochastic for later in range(step, end))
        if coincides or (step == 0 and not root):
            return (trunk,)
        return (trunk, Move(role=TWIG, ode_stops=ode_stops))

    return moves


def _stops(step: int, end: int, most: int | None) -> tuple[int, ...]:
    """At most so many indices that lead evenly from a step to the end of the schedule."""
    count = min(most or end, end - step)
    return tuple(step + round((end - step) * i / count) for i in range(1, count + 1))
