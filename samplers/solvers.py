"""Multistep solvers of the probability-flow ODE, from diffusers, for rollouts that are not replayed.

A multistep solver uses the velocities of several steps of a chain, so its edges have no kernels and its trees no branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DPMSolverMultistepScheduler, UniPCMultistepScheduler

from samplers.batches import batched
from samplers.kernels import State
from samplers.trees import TRUNK, Evaluate, Evaluation, Node, Root, Tree

# DPM-Solver++ (arXiv 2211.01095), UniPC (2302.04867): second order on the clean estimate; end steps are of first order.
SOLVERS: dict[str, tuple[type, dict[str, Any]]] = {
    "dpm2": (DPMSolverMultistepScheduler, {"solver_order": 2, "lower_order_final": True}),
    "unipc": (UniPCMultistepScheduler, {"solver_order": 2, "lower_order_final": True}),
}


def solve(
    solver: str, sigmas: Sequence[float], roots: Sequence[Root], start: State, evaluate: Evaluate, micro_batch: int
) -> Tree:
    """Solve the ODE from each root to sigma 0; return a tree of roots and ends, with evaluations but no edges."""
    tree = Tree(tuple(sigmas), [Node(None, root, (root.index,), TRUNK, sigmas[0], 0) for root in roots])
    parts = sorted({root.part for root in roots})
    by_part = [[i for i, root in enumerate(roots) if root.part == part] for part in parts]
    batches = [batch for of_part in by_part for batch in batched(of_part, micro_batch)]
    ends: dict[int, State] = {}
    for batch in batches:
        rows = [roots[i].row for i in batch]
        state = tuple(x[batch] for x in start)
        schedulers = [_scheduler(solver, sigmas) for _ in state]
        for step, sigma in enumerate(sigmas[:-1]):
            velocity = evaluate(state, sigma, rows)
            tree.evaluations.append(Evaluation(sigma, rows, roots[batch[0]].part, None, []))
            state = tuple(
                each.step(v.float(), each.timesteps[step], x.float(), return_dict=False)[0].to(x.dtype)
                for each, v, x in zip(schedulers, velocity, state, strict=True)
            )
        ends |= {i: tuple(x[row] for x in state) for row, i in enumerate(batch)}
    last = len(sigmas) - 1
    tree.nodes += [Node(i, root, (root.index,), TRUNK, 0.0, last) for i, root in enumerate(roots)]
    tree.leaves = list(range(len(roots), 2 * len(roots)))
    tree.samples = tuple(torch.stack(column) for column in zip(*(ends[i] for i in range(len(roots))), strict=True))
    return tree


def _scheduler(solver: str, sigmas: Sequence[float]) -> Any:
    kind, options = SOLVERS[solver]
    scheduler = kind(prediction_type="flow_prediction", use_flow_sigmas=True, final_sigmas_type="zero", **options)
    scheduler.set_timesteps(len(sigmas) - 1)
    scheduler.sigmas = torch.tensor(sigmas)
    scheduler.timesteps = scheduler.sigmas[:-1] * scheduler.config.num_train_timesteps
    scheduler.set_begin_index(0)
    return scheduler
