"""The credit axis: which edge of a tree earned the reward."""
