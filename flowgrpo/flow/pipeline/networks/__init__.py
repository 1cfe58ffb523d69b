"""The networks inside a pipeline: their traits, attention, switches and block cache."""
