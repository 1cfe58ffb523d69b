"""Config sections that forbid unknown keys, overrides of presets, and validation errors as one sentence."""
