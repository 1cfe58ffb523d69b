"""Several processes from one command: the same command line once per process, with the environment accelerate reads."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys


def needed(processes: int) -> bool:
    """Whether this process should start others: several are asked for, and no launcher has started this one."""
    return processes > 1 and "WORLD_SIZE" not in os.environ


def is_main() -> bool:
    """Whether this process is the one that speaks."""
    return os.environ.get("RANK", "0") == "0"


def relaunch(processes: int) -> int:
    """Run this command line in so many processes and wait; returns the status of the first that did not end well, or 0.

    Ctrl-C reaches the children by itself, and SIGTERM is passed on, so each finishes its iteration.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "flowgrpo", *sys.argv[1:]],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=None if rank == 0 else subprocess.DEVNULL,
        )
        for rank in range(processes)
    ]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: [child.terminate() for child in children])
    statuses = [child.wait() for child in children]
    return next((status for status in statuses if status), 0)
