"""What a run adds to the pipeline's networks: the first LoRA, a teacher, context parallelism, and an estimate of memory."""
