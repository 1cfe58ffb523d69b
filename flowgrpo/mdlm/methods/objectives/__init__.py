"""Losses of texts, and how tokens are aggregated."""
