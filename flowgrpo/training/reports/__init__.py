"""Outputs of a run: metrics, progress, samples, trees, trackers and model cards."""
