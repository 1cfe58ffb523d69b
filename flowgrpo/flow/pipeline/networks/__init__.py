"""The networks inside a pipeline: their traits, attention, and switches of memory and speed."""
