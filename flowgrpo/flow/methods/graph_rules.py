"""Settings of a config with which the first update cannot use the graphs of a rollout."""

from __future__ import annotations

from typing import Any

from flowgrpo.schema.sections import AUTO


def hindrance(config: Any) -> str | None:
    """Return the first such setting as text; None without one."""
    train, run, algorithm = config.train, config.run, config.algorithm
    rule = getattr(algorithm.tree, "prune", None)
    settings = {
        "algorithm.likelihood=elbo": algorithm.likelihood.name == "elbo",  # its evaluations are not the rollout's
        "run.engine": run.engine is not None,
        f"algorithm.hints={algorithm.hints.name}": algorithm.hints.name != "none",
        f"run.staleness={run.staleness}": run.staleness > 0,
        f"run.generators={run.generators}": run.generators > 0,
        f"run.sharding={run.sharding}": run.sharding != "none",
        "model.offload_activations=true": config.model.offload_activations,
        # With the next settings the remaining edges are gathered into fewer calls, which is cheaper than all calls.
        f"algorithm.tree.prune.rule={rule and rule.rule}": rule is not None and rule.rule != "depth",
        f"algorithm.baseline.{algorithm.baseline.drops}=true": algorithm.baseline.drops is not None,
        "algorithm.tree.stop": algorithm.stop is not None,
        "train.select": train.select is not None,
        "prompts.pick.second_stage": config.prompts.pick.second_stage is not None,  # its graphs cannot be foreseen
        "train.split=edges": train.split == "edges",
        # If the two sizes are found separately, they may differ.
        f"train.rollout_batch={train.rollout_batch}": train.rollout_rows != train.update_rows
        or (train.rollout_batch is not None and AUTO in (train.rollout_batch, train.micro_batch)),
    }
    return next((setting for setting, hinders in settings.items() if hinders), None)
