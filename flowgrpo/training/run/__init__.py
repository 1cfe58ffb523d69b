"""The folder and the life of a run: files, phases, random states, and why it stopped."""
