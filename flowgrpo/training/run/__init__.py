"""A run's folder and life cycle: files, phases, random states and reasons to stop."""
