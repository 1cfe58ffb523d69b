"""Rollouts by an engine outside (`run.engine`), SGLang-Diffusion: asked for, scored again, and corrected."""
