"""Rollouts by an external SGLang-Diffusion engine (`run.engine`): requests, scores by our model, correction."""
