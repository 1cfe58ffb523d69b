"""Rollouts by an external engine (`run.engine`): SGLang-Diffusion, and engines of texts that send step maps."""
