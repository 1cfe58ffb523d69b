"""The tree axis: shapes of the rollout tree, finishes of its branches, and pruning."""
