"""Training on stored groups, without rollouts."""
