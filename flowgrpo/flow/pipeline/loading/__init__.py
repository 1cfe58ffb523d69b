"""Loading of pipelines, and pipelines without weights for plans."""
