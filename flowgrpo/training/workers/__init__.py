"""Processes beside the trainer: asynchronous rollouts and evaluation."""
