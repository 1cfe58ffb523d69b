"""What the doors to engines outside share (`run.engine`): requests, pushes, refusals, and what is told of the mismatch."""
