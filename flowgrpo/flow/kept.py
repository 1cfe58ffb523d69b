"""The trees of a rollout as a run keeps them: of every node its portrait, and what the edge that led there earned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from flowgrpo.flow.config import Config
from flowgrpo.flow.portrait import Portrait
from flowgrpo.flow.rollout import Batch
from flowgrpo.flow.update import Credited
from flowgrpo.training.combination import Combination
from flowgrpo.training.kept_trees import KeptNode, KeptTree, Part, known
from samplers.kernels import transition
from samplers.trees import TRUNK, Edges, Tree

Fields = dict[str, Any]  # of a `KeptNode`


def parts(
    config: Config, combination: Combination, batch: Batch, credited: Credited, *, iteration: int, names: Iterable[str]
) -> list[Part]:
    """What this process has of the trees that are kept of an iteration; nothing of one without portraits.

    Args:
        combination: of the rewards, into what is trained on.
        credited: what the update trains on.
        names: of the rewards.
    """
    by_group: dict[int, list[Portrait]] = defaultdict(list)
    for each in batch.portraits:
        by_group[each.root.group].append(each)
    earned = _earned(credited, batch.tree) if by_group else {}
    found = []
    for group, own in by_group.items():
        pictures = [each.picture for each in own if each.picture is not None]
        numbers = iter(range(len(pictures)))
        nodes = []
        for each in own:
            came = earned.get(each.node, {})
            if config.algorithm.solver is not None and each.parent is not None:
                came = {**came, "kernel": config.algorithm.solver}
            fields = {"tile": None if each.picture is None else next(numbers), **_seen(each, combination), **came}
            role = TRUNK if each.node is None else batch.tree.nodes[each.node].role
            seed = each.root.row.seed if each.parent is None else None
            sigma = batch.tree.sigmas[each.step]
            nodes.append(KeptNode(parent=each.parent, step=each.step, sigma=sigma, role=role, seed=seed, **fields))
        tree = KeptTree(
            step=iteration + 1,
            group=group,
            prompt=own[0].root.row.prompt,
            sigmas=tuple(batch.tree.sigmas),
            names=tuple(names),
            tile=(0, 0),
            nodes=tuple(nodes),
        )
        found.append(Part(tree, pictures))
    return found


def _seen(each: Portrait, combination: Combination) -> Fields:
    """What is known of a state itself."""
    if each.rewards is None:
        return {"estimated": each.estimated}
    return {
        "estimated": each.estimated,
        "rewards": tuple(known(value) for value in each.rewards.tolist()),
        "total": known(float(combination.total(each.rewards[None])[0])),
    }


def _earned(credited: Credited, grown: Tree) -> dict[int, Fields]:
    """Fields of a `KeptNode` by the node that each edge leads to: how it was drawn, and what came of it."""
    units = credited.units
    if credited.noised is None:
        updated = {
            node: edges for e in credited.tree.evaluations for edges in e.trained for node in edges.nodes.tolist()
        }
    else:
        updated = {grown.leaves[draw.leaf] for call in credited.noised.calls for draw in call.draws}
    found: dict[int, Fields] = {}
    for evaluation in grown.evaluations:
        for edges in evaluation.edges:
            kernel, noise = edges.move.kernel, _noise(edges, evaluation.sigma, grown.sigma_cap)
            step_weight = credited.step_weights.get((kernel, evaluation.sigma, edges.sigma_next), 1.0)
            for row, node in enumerate(edges.nodes.tolist()):
                found[node] = {
                    "kernel": f"{kernel.name} {kernel.level:g}" if kernel.stochastic else kernel.name,
                    "noise": noise,
                    "trained": edges.move.trained,
                    "weight": step_weight,
                    "log_prob": None if edges.log_prob is None else known(float(edges.log_prob[row])),
                }
    for node, unit in enumerate(units.of_edge.tolist()):
        if unit < 0:
            continue
        own = found.setdefault(node, {"trained": True})
        own |= {
            "trained": own["trained"] or credited.noised is not None,
            "updated": node in updated,
            "unit": unit,
            "compared": tuple(units.comparison[unit].tolist()),
            "advantage": known(float(credited.advantages[unit])),
            "weight": known(own.get("weight", 1.0) * float(units.weight[unit] * credited.group_weight[unit])),
        }
    return found


def _noise(edges: Edges, sigma: float, sigma_cap: float) -> float:
    """The standard deviation of a step."""
    nothing = (torch.zeros(1, 1),)
    _, std = transition(edges.move.kernel, nothing, nothing, sigma, edges.sigma_next, sigma_cap)
    return edges.move.noise_scale * float(std)
