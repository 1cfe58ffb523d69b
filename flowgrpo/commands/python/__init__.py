"""The Python door: `flowgrpo.Trainer`, for a notebook or a script that holds a pipeline and a function."""
