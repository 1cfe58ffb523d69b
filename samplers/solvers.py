"""Multistep solvers of the probability flow, diffusers' own, for rollouts of which nothing is replayed.

A multistep solver belongs to a whole chain: it moves by the velocities of several steps, so that no edge has a kernel of its
own and no tree can be grown by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DPMSolverMultistepScheduler, UniPCMultistepScheduler

from samplers.batches import batched
from samplers.kernels import State
from samplers.trees import TRUNK, Evaluate, Evaluation, Node, Root, Tree

# DPM-Solver++ (arXiv 2211.01095) and UniPC (2302.04867), both of second order on the clean estimate: one evaluation a step,
# the first and the last step of first order.
SOLVERS: dict[str, tuple[type, dict[str, Any]]] = {
    "dpm2": (DPMSolverMultistepScheduler, {"solver_order": 2, "lower_order_final": True}),
    "unipc": (UniPCMultistepScheduler, {"solver_order": 2, "lower_order_final": True}),
}


def solve(
    solver: str, sigmas: Sequence[float], roots: Sequence[Root], start: State, evaluate: Evaluate, micro_batch: int
) -> Tree:
    """Walk every root to its end; return the tree of roots and ends, whose evaluations have no trained edges.

    Args:
        solver: a key of `SOLVERS`.
        sigmas: the schedule, float32 values, descending to 0.
        roots: R roots.
        start: their states, tensors (R, ...), whose dtype is the storage dtype.
        evaluate: the model.
        micro_batch: most rows of one evaluation; those of one evaluation are of one part.
    """
    tree = Tree(tuple(sigmas), [Node(None, root, (root.index,), TRUNK, sigmas[0], 0) for root in roots])
    by_part = [
        [i for i, root in enumerate(roots) if root.part == part] for part in sorted({root.part for root in roots})
    ]
    batches = [batch for own in by_part for batch in batched(own, micro_batch)]
    ends: dict[int, State] = {}
    for batch in batches:
        rows = [roots[i].row for i in batch]
        state = tuple(x[batch] for x in start)
        walkers = [_walker(solver, sigmas) for _ in state]
        for step, sigma in enumerate(sigmas[:-1]):
            velocity = evaluate(state, sigma, rows)
            tree.evaluations.append(Evaluation(sigma, rows, roots[batch[0]].part, None, []))
            state = tuple(
                each.step(v.float(), each.timesteps[step], x.float(), return_dict=False)[0].to(x.dtype)
                for each, v, x in zip(walkers, velocity, state, strict=True)
            )
        ends |= {i: tuple(x[row] for x in state) for row, i in enumerate(batch)}
    last = len(sigmas) - 1
    tree.nodes += [Node(i, root, (root.index,), TRUNK, 0.0, last) for i, root in enumerate(roots)]
    tree.leaves = list(range(len(roots), 2 * len(roots)))
    tree.samples = tuple(torch.stack(column) for column in zip(*(ends[i] for i in range(len(roots))), strict=True))
    return tree


def _walker(solver: str, sigmas: Sequence[float]) -> Any:
    """A scheduler of diffusers that stands at the first of our sigmas."""
    kind, options = SOLVERS[solver]
    walker = kind(prediction_type="flow_prediction", use_flow_sigmas=True, final_sigmas_type="zero", **options)
    walker.set_timesteps(len(sigmas) - 1)
    walker.sigmas = torch.tensor(sigmas)
    walker.timesteps = walker.sigmas[:-1] * walker.config.num_train_timesteps
    walker.set_begin_index(0)
    return walker
