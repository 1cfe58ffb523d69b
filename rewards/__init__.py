"""Rewards: functions of samples, prompts and columns, found by name, path, file or entry point."""

from rewards.base import BUILT_IN, Reward, RewardError, load

__all__ = ["BUILT_IN", "Reward", "RewardError", "load"]
