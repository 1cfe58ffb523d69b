"""`flowgrpo compare`: one page of several runs."""
