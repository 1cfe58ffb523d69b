"""Commands in processes of their own without the seconds that a fresh interpreter imports for.

A server with all imports done (of `multiprocessing`, started by the first command) forks itself for each command, and where
a command starts several processes, it forks itself for each of them. All else is as `python -m flowgrpo` would do it.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "forked_first",
        "flowgrpo.cli",
        "flowgrpo.commands.runs.train",
        "flowgrpo.flow.setup",
        "flowgrpo.mdlm.setup",
        "flowgrpo.mdlm.trainer",
        "diffusers.guiders",
        "diffusers.pipelines.onnx_utils",
        "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
        "transformers.models.clip.modeling_clip",
        "transformers.models.llama.modeling_llama",
        "transformers.models.t5.modeling_t5",
        "peft",
        "torch.distributed",
        "torchvision.io",
        "zoo",
        "forked_ready",
    ]
)


def process(function, *arguments, **options):
    """A process that calls a function, begun by the server, which has to find this folder to get ready."""
    root = Path(__file__).parents[1]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "tests"), *filter(None, [before])])
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    started = CONTEXT.Process(target=function, args=arguments, kwargs=options)
    started.start()
    return started


class Command:
    """A command that runs, with what the tests use of `subprocess.Popen`."""

    def __init__(self, arguments, environment, folder=".", run=None):
        """`run` takes the place of `flowgrpo` with these arguments."""
        self._folder = tempfile.TemporaryDirectory()
        self._said = [Path(self._folder.name, name) for name in ("out", "err")]
        for file in self._said:
            file.touch()
        self._process = process(
            _command,
            arguments,
            {**os.environ, **environment},
            os.path.abspath(folder),
            [str(file) for file in self._said],
            deaf=signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
            run=run or _run,
        )
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout=None):
        self._process.join(timeout)

    def lines(self, number):
        """The first lines that it prints, once they are there."""
        while True:
            printed = self._said[0].read_text().splitlines(True)
            if len(printed) >= number and printed[number - 1].endswith("\n"):
                return printed[:number]
            assert self.poll() is None, self._said[1].read_text()
            time.sleep(0.02)

    def communicate(self, timeout=None):
        self._process.join(timeout)
        if self.poll() is None:
            self.kill()
            raise TimeoutError(f"the command takes more than {timeout} seconds; it said {self._said[1].read_text()}")
        return tuple(file.read_text() for file in self._said)


def _command(arguments, environment, folder, said, *, deaf, run):
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate(said, start=1):
        _write_to(number, os.open(file, os.O_WRONLY | os.O_APPEND))
    signal.signal(signal.SIGINT, signal.SIG_IGN if deaf else signal.default_int_handler)
    sys.path.insert(0, folder)
    sys.argv = ["flowgrpo", *arguments]
    from flowgrpo.commands import launch

    launch.subprocess = SimpleNamespace(Popen=_Rank)
    run()


def torchrun():
    """What torchrun's command line is, whose workers are `flowgrpo`."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = _Worker
    _ended(lambda: run.main(sys.argv[1:]))


def _write_to(number, descriptor):
    (sys.stdout, sys.stderr)[number - 1].flush()
    os.dup2(descriptor, number)


def _run():
    """Run the command line, and end as an interpreter would."""
    from flowgrpo.__main__ import entry

    _ended(entry)


def _ended(entry):
    status = 0
    try:
        entry()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class _Rank:
    """One of several processes of a command, with what `launch` uses of `subprocess.Popen`."""

    def __init__(self, command, env, stderr, start_new_session):
        assert command == [sys.executable, "-m", "flowgrpo", *sys.argv[1:]]
        assert start_new_session
        sys.stdout.flush()
        sys.stderr.flush()
        self._begin(env, stderr)

    def _begin(self, env, stderr):
        self.returncode = None
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            if stderr:
                _write_to(2, stderr.fileno())
            os.environ.clear()
            os.environ.update(env)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, {signal.SIGINT: signal.default_int_handler}.get(number, signal.SIG_DFL))
            sys.unraisablehook = sys.__unraisablehook__
            _run()

    def poll(self):
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


class _Worker(_Rank):
    """One of torchrun's workers, with what it uses of `subprocess.Popen`."""

    def __init__(self, args, env, stdout, stderr, start_new_session):
        before = [sys.executable, "-u", "-m", "flowgrpo"]
        assert (list(args[: len(before)]), stdout, stderr, start_new_session) == (before, None, None, True)
        sys.argv = ["flowgrpo", *args[len(before) :]]
        self._begin(env, None)

    def wait(self, timeout):
        end = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        return self.returncode
