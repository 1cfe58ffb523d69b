"""Plans: the moves at each (role, step), one function for each shape of tree.

`kernels` has one kernel for each step of the schedule, so that noise levels may differ between steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from samplers.kernels import DPM2, ODE, Kernel
from samplers.trees import TWIG, Move, Plan

SIDE = "side"  # role of a brush's branches, which ODE steps finish


def chain(kernels: Sequence[Kernel], stochastic: Collection[int], trained: Collection[int]) -> Plan:
    """Return the plan of a chain: kernel steps at the `stochastic` steps, ODE elsewhere; the `trained` steps train."""
    return lambda role, step: (Move(kernels[step], trained=step in trained) if step in stochastic else Move(),)


def second_order(plan: Plan) -> Plan:
    """Return a plan with ODE steps of second order in place of Euler's, where no side path is finished (`ode_stops`)."""

    def moves(role: str, step: int) -> list[Move]:
        return [
            replace(move, kernel=DPM2) if move.kernel == ODE and move.ode_stops is None else move
            for move in plan(role, step)
        ]

    return moves


def brush(kernels: Sequence[Kernel], branches: Sequence[int], finish: int | None = None) -> Plan:
    """Return the plan of an ODE trunk with `branches[i]` stochastic, trained children at step i, each finished by ODE.

    TempFlow-GRPO (arXiv 2508.04324). The trunk ends at its last branching, since its sample is not needed. A branch is
    finished in at most `finish` steps, by default in all the remaining steps.
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
    """Return the plan of a tree with `factor` children at the `splits` and one child elsewhere.

    Steps that are not `stochastic` are ODE. BranchGRPO and BranchGRPO-Mix (arXiv 2509.06040) have such trees.
    """

    def moves(role: str, step: int) -> tuple[Move, ...]:
        if step in splits:
            siblings = Move(kernels[step], count=factor, trained=step in trained)
            return (replace(siblings, sibling_strength=sibling_strength, noise_scale=noise_scale),)
        return (Move(kernels[step], trained=step in trained) if step in stochastic else Move(),)

    return moves


def twigs(kernels: Sequence[Kernel], stochastic: Collection[int], length: int | None, root: bool) -> Plan:
    """Return the plan of trained chains with an ODE twig from every node to a clean sample.

    A twig has at most `length` steps (None: all that remain). Its first step shares its node's evaluation. A node has
    no twig if the chain takes the same steps to the end. The root has one only with `root`, for the gain of step 0.
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
    count = min(most or end, end - step)
    return tuple(step + round((end - step) * i / count) for i in range(1, count + 1))
