"""The update of an iteration: replayed trajectories, noised samples, path ratios and kept rollout graphs."""
