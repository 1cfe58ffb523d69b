"""Records of a rollout's trees for reports: each node's preview, and the credit of the edge to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

from flowgrpo.flow.config import Config
from flowgrpo.flow.rollouts.rollout import Batch
from flowgrpo.flow.rollouts.state_preview import StatePreview
from flowgrpo.flow.updates.update import Credited
from flowgrpo.training.advantages.reward_combination import Combination
from flowgrpo.training.reports.tree_store import KeptNode, KeptTree, encode_picture, finite_or_none
from samplers.kernels import slope
from samplers.trees import TWIG

Fields = dict[str, Any]  # fields of a `KeptNode` by name


def build_kept_trees(
    config: Config, combination: Combination, batch: Batch, credited: Credited, *, iteration: int, names: Iterable[str]
) -> list[KeptTree]:
    """Return this process's parts of the kept trees of an iteration; [] without previews."""
    by_group: dict[int, list[StatePreview]] = defaultdict(list)
    for each in batch.previews:
        by_group[each.root.group].append(each)
    earned = _edge_fields(batch, credited, {each.node for each in batch.previews})
    trees = []
    for group, previews in by_group.items():
        nodes = []
        for each in previews:
            fields = {**_state_fields(each, combination), **earned.get(each.node, {})}
            twig = batch.tree.nodes[each.node].role == TWIG
            sigma = batch.tree.sigmas[each.step]
            nodes.append(KeptNode(parent=each.parent, step=each.step, sigma=sigma, twig=twig, **fields))
        height, width = next(each.picture.shape[1:3] for each in previews if each.picture is not None)
        trees.append(
            KeptTree(
                step=iteration + 1,
                group=group,
                prompt=previews[0].root.row.prompt,
                sigmas=tuple(batch.tree.sigmas),
                names=tuple(names),
                size=(width, height),
                nodes=tuple(nodes),
            )
        )
    return trees


def _state_fields(each: StatePreview, combination: Combination) -> Fields:
    """Return the fields of a node that describe its state."""
    fields: Fields = {"estimated": each.estimated}
    if each.parent is None:
        fields["seed"] = each.root.row.seed
    if each.picture is not None:
        fields["picture"] = encode_picture(each.picture)
    if each.rewards is not None:
        fields["rewards"] = tuple(finite_or_none(value) for value in each.rewards.tolist())
        fields["total"] = finite_or_none(float(combination.total(each.rewards[None])[0]))
    return fields


def _edge_fields(batch: Batch, credited: Credited, kept: Collection[int]) -> dict[int, Fields]:
    """Return the fields of the kept edges, by the node each leads to: kernel, noise, training and credit."""
    tree, units, noised = batch.tree, credited.units, credited.noised
    fields: dict[int, Fields] = {}
    for evaluation in tree.evaluations:
        for edges in evaluation.edges:
            kept_here = [(place, node) for place, node in enumerate(edges.nodes.tolist()) if node in kept]
            if not kept_here:
                continue
            kernel, sigmas = edges.move.kernel, (evaluation.sigma, edges.sigma_next)
            _, std = slope(kernel, *sigmas, tree.sigma_cap)
            log_probs = None if edges.log_prob is None else edges.log_prob.tolist()
            for place, node in kept_here:
                fields[node] = {
                    "kernel": kernel.label,
                    "noise": edges.move.noise_scale * std,
                    "trained": edges.move.trained,
                    "weight": credited.step_weights.get((kernel, *sigmas), 1.0),
                    "log_prob": None if log_probs is None else finite_or_none(log_probs[place]),
                }
    if noised is None:
        trained = {node for e in credited.tree.evaluations for edges in e.trained for node in edges.nodes.tolist()}
        credit = kept
    else:
        draws = [draw for call in noised.calls for draw in call.draws]
        splits = noised.splits
        trained = {draw.edge if splits else tree.leaves[draw.leaf] for draw in draws}
        credit = set(kept) if splits else set(tree.leaves) & set(kept)
    advantages, weights = credited.advantages.tolist(), (units.weight * credited.group_weight).tolist()
    of_edge, compared = units.of_edge.tolist(), units.comparison.tolist()
    for node in credit:
        if (unit := of_edge[node]) < 0:
            continue
        edge = fields.setdefault(node, {})
        edge["trained"] = edge.get("trained", False) or noised is not None
        advantage = finite_or_none(advantages[unit])
        edge |= {
            "updated": node in trained and advantage is not None,
            "unit": unit,
            "compared": tuple(compared[unit]),
            "advantage": advantage,
            "weight": finite_or_none(edge.get("weight", 1.0) * weights[unit]),
        }
    return fields
