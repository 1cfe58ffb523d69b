"""Masked-diffusion language models: architectures, loading, LoRA targets, memory."""
