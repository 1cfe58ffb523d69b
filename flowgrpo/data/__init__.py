"""Training data: prompts and their columns, public corpora, generated tasks, stored groups, embedded models."""
