"""Public import for the code in model cards: `loaded` opens the files of a row (`flowgrpo.data.conditions.load_file`)."""

from flowgrpo.data.conditions import load_file as loaded

__all__ = ["loaded"]
