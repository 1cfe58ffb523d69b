"""`flowgrpo evaluate`: score models on evaluation sets, by category with errors, and compare them."""
