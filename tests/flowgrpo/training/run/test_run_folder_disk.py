"""A full disk is told from other errors, whoever raised it."""

import errno
import os
import resource

import pytest
import torch
from safetensors.torch import save_file

from flowgrpo.training.checkpoints import snapshot
from flowgrpo.training.run import run_folder


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "Disk quota exceeded"),
        *[(error, None) for error in (OSError(errno.EACCES, "Permission denied"), ValueError("No space left"), None)],
    ],
)
def test_errors_of_the_system_are_told_by_their_number(error, said):
    assert run_folder.disk_full(error) == said


def test_the_system_s_error_may_lie_behind_another():
    error = RuntimeError("unexpected pos")
    error.__context__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert run_folder.disk_full(error) == "No space left on device"
    error.__context__ = error  # a circle
    assert run_folder.disk_full(error) is None


def write_too_much(way, file):
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    try:
        way(file, {"a": torch.zeros(10_000)})
    except Exception as error:
        os._exit(7 if run_folder.disk_full(error) == "File too large" else 1)


@pytest.mark.parametrize(
    "way", [snapshot._write, lambda file, tensors: save_file(tensors, file)], ids=["torch", "safetensors"]
)
def test_what_the_libraries_make_of_it_is_told_too(tmp_path, way):
    pid = os.fork()
    if not pid:
        write_too_much(way, tmp_path / "file")
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_the_room_is_that_of_the_disk(tmp_path):
    space = os.statvfs(tmp_path)
    free, total = (space.f_frsize * blocks / 2**30 for blocks in (space.f_bavail, space.f_blocks))
    said = run_folder.disk_room(tmp_path)
    assert said.endswith(f" of {total:.2f} GiB are free")
    assert float(said.split()[0]) == pytest.approx(free, abs=1)
