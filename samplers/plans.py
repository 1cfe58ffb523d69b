"""Plans: the moves of each method at a (role, step), one function per shape of tree.

`kernels` holds the kernel of each step of the schedule, so that noise levels may differ from step to step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from samplers.kernels import Kernel
from samplers.trees import TWIG, Move, Plan

SIDE = "side"  # a branch of a brush, which goes on by ODE


def chain(kernels: Sequence[Kernel], stochastic: Collection[int], trained: Collection[int]) -> Plan:
    """Plan one child per node: a step of the kernel at `stochastic` steps, an ODE step elsewhere; train the `trained` steps.

    Flow-GRPO and DanceGRPO when all steps but the last are stochastic; Flow-GRPO-Fast and MixGRPO when only a window is.
    """
    return lambda role, step: (Move(kernels[step], trained=step in trained) if step in stochastic else Move(),)


def brush(kernels: Sequence[Kernel], branches: Sequence[int], finish: int | None = None) -> Plan:
    """Plan an ODE trunk that grows `branches[i]` stochastic, trained children at step i, each finished by ODE.

    TempFlow-GRPO (arXiv 2508.04324). The trunk ends where it branches for the last time, since its end is not needed. A
    branch is finished in at most `finish` steps, by default in all that remain.
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
    """Plan a tree of trunk nodes: `factor` children at the `splits`, one elsewhere; ODE at steps that are not `stochastic`.

    BranchGRPO (arXiv 2509.06040), and with a window of stochastic steps its Mix. The noise of siblings is as in `Move`.
    """

    def moves(role: str, step: int) -> tuple[Move, ...]:
        if step in splits:
            siblings = Move(kernels[step], count=factor, trained=step in trained)
            return (replace(siblings, sibling_strength=sibling_strength, noise_scale=noise_scale),)
        return (Move(kernels[step], trained=step in trained) if step in stochastic else Move(),)

    return moves


def twigs(kernels: Sequence[Kernel], stochastic: Collection[int], length: int | None, root: bool) -> Plan:
    """Plan trained chains with an ODE twig of `length` steps (None: all that remain) from every node to a clean sample.

    DenseGRPO (all that remain), Stepwise-Flow-GRPO (5), VGPO (one jump). The first step of a twig shares the evaluation of
    its node. There is no twig where the chain itself takes the same steps to the end. With `root` the start has a twig,
    too, which a step's gain needs and a value does not.
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
    """Return at most `most` indices that lead evenly from a step to the end of the schedule."""
    count = min(most or end, end - step)
    return tuple(step + round((end - step) * i / count) for i in range(1, count + 1))
