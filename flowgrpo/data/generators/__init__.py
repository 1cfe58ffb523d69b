"""Prompts that this package draws: compositions, edits, motions, sounds, printed words, tasks, and the embedded world."""
