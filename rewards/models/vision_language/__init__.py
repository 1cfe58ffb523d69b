"""Rewards by vision-language models: those with a reward head, and those that are asked."""
