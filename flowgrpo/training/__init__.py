"""The training loop, shared by all kinds of models: rewards, advantages, weights, checkpoints, metrics and reports."""
