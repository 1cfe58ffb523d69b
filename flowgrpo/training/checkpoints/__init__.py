"""Checkpoints, written, verified and loaded for a resume, and LoRA files that a run starts from."""
