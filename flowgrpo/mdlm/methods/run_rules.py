"""Checks of a config, before anything is loaded: settings of the loop that do not go with a method."""

from __future__ import annotations

from typing import Any

from flowgrpo.errors import InputError


def check(config: Any) -> None:
    """Raise InputError if the split of the update, or an engine, does not go with a choice of `algorithm`."""
    algorithm, train, engine = config.algorithm, config.train, config.run.engine
    if train.split == "edges":
        raise InputError("train.split: an answer's tokens are updated on together, it has no edges; take samples")
    if algorithm.compares_groups is not None and train.split != "groups" and train.updates > 1:
        raise InputError(
            f"train.split: {algorithm.compares_groups} compares the answers of a group in one optimizer step; take groups"
        )
    if algorithm.measure in ("group_spread", "gated_distances") and algorithm.trains_branches_once:
        rule = algorithm.aggregation.shape.rule
        raise InputError(
            f"algorithm.aggregation.shape.rule: {rule} compares the tokens of whole answers, and a branch is trained on "
            "once; take pivotal, or algorithm.tree=chain"
        )
    if engine is None:
        return
    if algorithm.objective.couples and engine.log_probs:
        raise InputError(
            f"run.engine.log_probs: {algorithm.objective.name} weighs whole groups, not single answers; take false"
        )
    if algorithm.tree.name != "chain":
        raise InputError("algorithm.tree: an engine decodes whole answers; take chain, or remove run.engine")
    if algorithm.credit.name == "step_gain":
        raise InputError("algorithm.credit: an engine returns no predictions of single steps; take terminal")
    if algorithm.objective.solutions is not None:
        raise InputError(f"run.engine: {algorithm.objective.name} samples no rollouts, remove it")
