"""`flowgrpo watch` in a process of its own, ended by Ctrl-C."""

import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

ROOT = Path(__file__).parents[1]


@contextmanager
def watching(run, port=0):
    """Serve a run's page and yield its URL; then interrupt the server, whose status is to be 130."""
    command = [sys.executable, "-u", "-m", "flowgrpo", "watch", str(run), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        line = server.stdout.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert url, line + server.stderr.read()
        urlopen(url[0]).close()  # from here on it takes Ctrl-C as a server does
        yield url[0]
        server.send_signal(signal.SIGINT)
        told = server.communicate()
        assert (server.returncode, *told) == (130, "", "flowgrpo: interrupted\n")
    finally:
        server.kill()
        server.communicate()
