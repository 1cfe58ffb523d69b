"""Sources of rollouts and evaluations: this process, or other processes that work asynchronously."""
