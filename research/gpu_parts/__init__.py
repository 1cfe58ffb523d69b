"""The parts of `scripts/gpu_check.py`: what is checked and measured on a GPU, and the file that holds the results."""
