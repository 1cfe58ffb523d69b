"""`flowgrpo sample`: samples of prompts, and groups of them to train from."""
