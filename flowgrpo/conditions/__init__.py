"""What model cards import to open a row's picture; see `flowgrpo.data.conditions`."""

from flowgrpo.data.conditions import load_file as loaded

__all__ = ["loaded"]
