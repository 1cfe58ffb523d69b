"""Errors that end a command with one sentence: wrong input (exit status 2), a failed upload (exit status 1)."""


class InputError(ValueError):
    """Wrong input. The message is one sentence that names the place, often with the valid choice nearest to the input."""


class UploadFailed(Exception):
    """An upload that failed after all files were written. The message is one sentence that says how to repeat it."""
