"""Folder and life cycle of a run: files, phases, random states and reasons to stop."""
