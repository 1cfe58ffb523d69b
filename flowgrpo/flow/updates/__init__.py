"""The update: replayed trajectories, noised samples, path ratios and kept rollout graphs."""
