"""Choice of an iteration's prompts, group sizes and weights from reward statistics."""
