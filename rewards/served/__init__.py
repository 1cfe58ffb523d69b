"""Rewards over HTTP: the reward server and its client, and vision-language models behind an endpoint."""
