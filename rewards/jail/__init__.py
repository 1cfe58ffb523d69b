"""The program `python rewards/jail`, started by `rewards/sandbox/sandbox.py`: it locks itself up and runs a trial."""
