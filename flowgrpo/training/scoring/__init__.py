"""Scoring of samples: rewards in threads, groups across processes, held-out evaluation."""
