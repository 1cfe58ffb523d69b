"""One run at a time in a folder, and files that are whole or not there."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flowgrpo.errors import InputError
from flowgrpo.training.run import run_folder


def test_a_text_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    run_folder.replace_text(path, "old")

    def killed(*paths):
        raise KeyboardInterrupt

    def full(path, *args, **kwargs):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    for kind, name, fails, error in ((os, "replace", killed, KeyboardInterrupt), (Path, "write_text", full, OSError)):
        with monkeypatch.context() as patched:
            patched.setattr(kind, name, fails)
            with pytest.raises(error):
                run_folder.replace_text(path, "new")
        assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]  # the second time without a half
    run_folder.replace_text(path, "half a character \ud800, ö")
    assert path.read_bytes().decode() == "half a character \\ud800, ö"


def test_a_held_folder_is_refused_and_free_afterwards(tmp_path):
    folder = tmp_path / "runs" / "a"
    with run_folder.lock_folder(folder):
        said = f"process {os.getpid()} is still running in {folder}; wait for its end"
        with pytest.raises(InputError, match=said), run_folder.lock_folder(folder):
            pass
        (folder / "file").touch()
    with run_folder.lock_folder(folder):
        assert sorted(path.name for path in folder.iterdir()) == [run_folder.LOCK, "file"]
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_a_folder_that_nothing_was_put_into_is_gone(tmp_path):
    with pytest.raises(KeyError), run_folder.lock_folder(tmp_path / "runs" / "a"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_the_kernel_lets_go_of_a_killed_run(tmp_path):
    code = "import pathlib, sys, time; from flowgrpo.training.run import run_folder\n"
    code += "with run_folder.lock_folder(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, tmp_path / "a"], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=f"process {other.pid} is"), run_folder.lock_folder(tmp_path / "a"):
            pass
        other.send_signal(signal.SIGKILL)
    assert (tmp_path / "a" / run_folder.LOCK).exists()
    assert run_folder.is_empty(tmp_path / "a")  # to a new run it is as if nothing had been there
    with run_folder.lock_folder(tmp_path / "a"):
        pass


@pytest.mark.parametrize("parent", ["file", "/proc/no"])
def test_what_cannot_be_written_to_is_one_sentence(tmp_path, monkeypatch, parent):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    folder = type(tmp_path)(parent) / "a"
    with (
        pytest.raises(InputError, match=rf"^run\.dir: {folder} cannot be written to \(.+\)$"),
        run_folder.lock_folder(folder),
    ):
        pass
    with pytest.raises(InputError, match=rf"^--out: {folder} cannot be written to \(.+\)$"):
        run_folder.check_writable(folder, "--out")
    run_folder.check_writable(tmp_path / "new" / "one", "--out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_a_run_leaves_that_dies_as_it_begins_is_nothing(tmp_path):
    """It could neither begin again nor go on otherwise."""
    for name in (".lock", "start.safetensors", "config.yaml.partial"):
        (tmp_path / name).touch()
    assert run_folder.is_empty(tmp_path)
    (tmp_path / "config.yaml").touch()
    assert not run_folder.is_empty(tmp_path)
