"""Checkpoints and LoRA files: write, verify, shard, resume."""
