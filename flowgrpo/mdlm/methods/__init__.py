"""Seven axes of methods for texts, their presets and their mathematics."""
