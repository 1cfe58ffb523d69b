"""`flowgrpo | head`: a reader that goes ends a command without a traceback."""

import os
import subprocess
import sys

import pytest

from flowgrpo.__main__ import _is_closed


@pytest.mark.parametrize("arguments", [[], ["models"]])
def test_a_closed_pipe_ends_a_command_in_silence(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "flowgrpo", *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_an_open_pipe_is_not_taken_for_a_closed_one():
    reader, writer = os.pipe()
    assert not _is_closed(writer)
    os.close(reader)
    assert _is_closed(writer)
    os.close(writer)
