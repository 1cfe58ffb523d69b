"""Rollouts by an engine outside (`run.engine`): SGLang-Diffusion, and engines of texts that tell step maps."""
