"""What goes in: prompts and their columns, corpora, tasks drawn by us, and the embedded models."""
