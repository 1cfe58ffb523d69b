"""The error of wrong input: one sentence that names the place and the nearest valid choice; exit status 2."""


class InputError(ValueError):
    """What a user wrote is wrong. The message is one clear sentence; `rewards.base.nearest` ends many."""


class UploadFailed(Exception):
    """What was asked for is written, and its upload failed. The message is one sentence with the way out."""
