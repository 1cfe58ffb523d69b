"""From rewards to advantages and losses: reward combination, baselines, unit selection, and the clipped ratio."""
