"""The inside of `rewards/sandbox/sandbox.py`: a program of its own (`python rewards/jail`) that locks itself up and runs a
trial."""
