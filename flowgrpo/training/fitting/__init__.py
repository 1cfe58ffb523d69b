"""Batch sizes that fit into memory: probing of sizes, and their record in a run's folder."""
