"""Commands for rewards: list them, score files, serve them over HTTP."""
