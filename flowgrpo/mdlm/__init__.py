"""Masked-diffusion language models: prediction, decoding, likelihood, tasks."""
