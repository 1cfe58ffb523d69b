"""Rollouts: growth of latent trees, with drafts, cheap finishes, adaptive shapes and calibrated noise."""
