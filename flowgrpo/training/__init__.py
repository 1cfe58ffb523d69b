"""One loop over any kind of model: groups, rewards, advantages, weights, checkpoints, metrics and files."""
