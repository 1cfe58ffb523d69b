"""What goes with a second stage of samples for hard groups (`prompts.pick.second_stage`), and its largest size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flowgrpo.errors import InputError

if TYPE_CHECKING:
    from flowgrpo.schema.sections import RunConfig
    from rewards import Reward

KEY = "prompts.pick.second_stage"


def check(config: Any) -> None:
    """Raise InputError if a setting of the run does not go with a second stage, or leaves no room for one."""
    stage, run, algorithm = config.prompts.pick.second_stage, config.run, config.algorithm
    if stage is None:
        return
    solutions = getattr(algorithm.objective, "solutions", None)
    settings = {
        f"run.generators={run.generators}": (
            run.generators > 0,
            "a generator knows the rewards of its own groups only",
        ),
        "run.engine": (run.engine is not None, "an engine reports on one rollout of an iteration"),
        "data.groups": (config.stored_groups is not None, "its samples are there already"),
        "train.draft": (getattr(config.train, "draft", None) is not None, "its starts are chosen once an iteration"),
        f"algorithm.hints={algorithm.hints.name}": (algorithm.hints.name != "none", "both help groups that fail"),
        "algorithm.tree.stop": (getattr(algorithm, "stop", None) is not None, "stopped chains have no reward"),
        f"algorithm.objective={algorithm.objective.name}": (
            solutions is not None,
            "it learns from solutions, not samples",
        ),
    }
    for setting, (given, reason) in settings.items():
        if given:
            raise InputError(f"{KEY}: it does not go with {setting}, since {reason}; take null")
    roots = algorithm.roots(config.train.group_size)
    if stage.largest(roots) == roots:
        what = "sample" if roots == config.train.group_size else "tree"
        least = math.ceil(100 * (roots + 1) / roots) / 100
        raise InputError(f"{KEY}.most: {stage.most:g} x {roots} leaves no room for another {what}, take {least:g}")


def check_rewards(config: RunConfig, rewards: Sequence[Reward]) -> None:
    """Raise InputError if a reward compares the samples of a group, which come in two stages."""
    compares = next((reward.name for reward in rewards if reward.group_wise), None)
    if config.prompts.pick.second_stage is not None and compares is not None:
        raise InputError(
            f"rewards: {compares} compares the samples of a group, which come in two stages with {KEY}; take null"
        )


def plan_lines(most: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the plan's line, (label, text), of the `most` that a second stage adds; [] without a second stage."""
    rollout, update = (most["model_evaluations"][part] for part in ("rollout", "update"))
    text = f"at most {most['decoded']:,} samples more, with {rollout:,} rollout + {update:,} update evaluations, if all fail"
    return [("second stage", text)] * bool(most["decoded"])


def most_roots(config: RunConfig) -> int:
    """Return an upper bound of the mean number of roots of a group after both stages."""
    stage, train = config.prompts.pick.second_stage, config.train
    roots = config.algorithm.roots(train.group_size)
    if stage is None:
        return roots
    if config.prompts.pick.budget != "equal":  # sizes differ, and so do their limits
        return math.ceil(stage.most * roots)
    further = stage.further(0.0, train.group_size)  # falls as p rises
    return min(roots + math.ceil(further * roots / train.group_size), stage.largest(roots))
