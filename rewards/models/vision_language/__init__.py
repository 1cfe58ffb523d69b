"""Rewards by vision-language models with a reward head."""
