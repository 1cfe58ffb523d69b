"""Choose the prompts of an iteration, by what is known of them."""
