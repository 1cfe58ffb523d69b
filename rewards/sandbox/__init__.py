"""Run and examine programs that a model wrote."""
