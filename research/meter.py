"""Run a command and write its wall seconds, CPU seconds and peak resident bytes to a file, as JSON.

    python -S research/meter.py FILE COMMAND ...

Linux counts the memory of the process that starts another one to the peak of the other. So a benchmark, which is large,
starts this small process, which starts the command. Processes that the command waits for count too: their seconds are
added, and the peak is that of the largest. The exit status is that of the command.
"""

import json
import os
import subprocess
import sys
import time


def main() -> int:
    """Run the command line."""
    started = time.perf_counter()
    process = subprocess.Popen(sys.argv[2:])
    _, status, used = os.wait4(process.pid, 0)
    wall, process.returncode = time.perf_counter() - started, os.waitstatus_to_exitcode(status)
    with open(sys.argv[1], "w") as file:
        json.dump({"wall": wall, "cpu": used.ru_utime + used.ru_stime, "peak": 1024 * used.ru_maxrss}, file)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
