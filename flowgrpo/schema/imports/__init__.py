"""Lazy imports and package versions."""
