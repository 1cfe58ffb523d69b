"""What a run is given beside its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowgrpo.data.prompts import Prompt
from rewards import Reward


@dataclass(frozen=True)
class RunData:
    """The prompts and the rewards of a run.

    Attributes:
        train_prompts: are trained on.
        eval_prompts: held out.
        rewards: are trained on, and evaluated on held-out prompts too.
        eval_rewards: only evaluated.
    """

    train_prompts: Sequence[Prompt]
    eval_prompts: Sequence[Prompt]
    rewards: Sequence[Reward]
    eval_rewards: Sequence[Reward] = ()
