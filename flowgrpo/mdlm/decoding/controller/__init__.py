"""A learned controller of commitment (TraceLock): its network, traces and files."""
