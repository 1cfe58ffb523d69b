"""Rewards of vision-language models in this process."""
