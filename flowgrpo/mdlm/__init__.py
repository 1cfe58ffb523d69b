"""Masked-diffusion language models: decoders, likelihood estimators, objectives and tasks."""
