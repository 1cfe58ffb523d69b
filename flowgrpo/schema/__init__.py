"""What a configuration is made of: strict sections, words with options, and what is wrong with them in a sentence."""
