"""The credit axis: rules that say which edge of a tree earned the reward."""
