"""Generated prompts: compositions, edits, motions, sounds, printed words, tasks, and scenes for the embedded model."""
