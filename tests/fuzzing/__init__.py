"""Fuzzing of what comes from outside, a file for each subject: `fuzz(seed, count)` of each returns a `runner.Summary`."""
