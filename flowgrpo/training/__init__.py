"""One loop over any kind of model: groups, rewards, advantages, weights, checkpoints and what is written down."""
