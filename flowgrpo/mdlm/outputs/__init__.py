"""Outputs of language models: exported weights and samples."""
