"""Run programs that a model wrote: the sandbox, and how a program is examined."""
