"""The objective axis: losses of trajectories and of final samples."""
