"""Load a pipeline, or build it without weights to plan with it."""
