"""Outputs of flow models: exported weights, samples, stored groups and preference pairs."""
