"""`python -m flowgrpo`, and `accelerate launch -m flowgrpo`."""

from flowgrpo.cli import entry

entry()
