"""`flowgrpo methods`: the words and presets of both wings, and the tables of docs that repeat them."""
