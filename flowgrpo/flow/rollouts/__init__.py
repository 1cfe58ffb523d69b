"""Rollouts: grow trees of latents, with drafts, cheap finishes, adaptive shapes and calibrated noise."""
