"""Additions to a pipeline's networks: an initial LoRA, a teacher, context parallelism; and an estimate of memory."""
