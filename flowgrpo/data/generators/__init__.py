"""Generated prompts: compositions, edits, motions, sounds, printed words, tasks, and the embedded world."""
