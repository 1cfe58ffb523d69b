"""Inputs of a run besides its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowgrpo.data.prompts import Prompt
from rewards import Reward


@dataclass(frozen=True)
class RunData:
    """The prompts and rewards of a run; `eval_rewards` are evaluated but not trained on."""

    train_prompts: Sequence[Prompt]
    eval_prompts: Sequence[Prompt]
    rewards: Sequence[Reward]
    eval_rewards: Sequence[Reward] = ()
