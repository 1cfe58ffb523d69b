"""Masked-diffusion language models."""
