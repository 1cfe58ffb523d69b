"""From rewards to advantages: prompt groups, baselines, selection, and the clipped ratio."""
