"""Rewards: functions of samples, prompts and columns, found by name, path, file or entry point."""

from rewards.base import Reward, RewardError, load
from rewards.cards import BUILT_IN

__all__ = ["BUILT_IN", "Reward", "RewardError", "load"]
