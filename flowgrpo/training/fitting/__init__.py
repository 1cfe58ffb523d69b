"""Batches that fit into memory: search, measure, and retry after running out."""
