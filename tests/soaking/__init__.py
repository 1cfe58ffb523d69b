"""Runs that are killed at random moments, and whose checkpoints are damaged between; see scripts/soak.py."""
