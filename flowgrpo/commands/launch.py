"""Several processes from one command: the same command line once per process, with the environment accelerate reads."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from flowgrpo.errors import InputError
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.training.run import stop_reasons
from flowgrpo.training.run.stop_reasons import Killed

if TYPE_CHECKING:
    import psutil
    import torch
    from torch import distributed
    from torch.distributed import TCPStore

    from flowgrpo.training.checkpoints import checkpoint
else:
    checkpoint = lazy("flowgrpo.training.checkpoints.checkpoint")
    psutil = lazy("psutil")
    torch = lazy("torch")
    distributed = lazy("torch.distributed")

GRACE = 20  # seconds
OURS = "FLOWGRPO_LAUNCHED"  # in the environment of processes that `relaunch` started: the launcher's number
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
INTERRUPTED = 130  # the status of one that Ctrl-C ended
LOST = 3  # the status of a process that ends because another has; `relaunch` never returns it

OURS_ALONE = "there is run.sharding instead"
OFF = ("", "0", "false", "no", "off", "n", "f")
# What accelerate's environment may ask for and a run would not get: the variable, the values that ask for nothing, what it
# is, and what there is instead.
UNHEARD = (
    ("ACCELERATE_MIXED_PRECISION", OFF, "mixed precision", "set model.dtype"),
    ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", (*OFF, "1"), "gradient accumulation", "set train.micro_batch"),
    ("ACCELERATE_USE_FSDP", OFF, "FSDP", "set run.sharding"),
    ("ACCELERATE_USE_DEEPSPEED", OFF, "DeepSpeed", OURS_ALONE),
    ("ACCELERATE_USE_MEGATRON_LM", OFF, "Megatron-LM", OURS_ALONE),
    (
        "ACCELERATE_USE_PARALLELISM_CONFIG",
        OFF,
        "a parallelism config",
        "there are run.sharding and run.context_parallel instead",
    ),
    ("ACCELERATE_DYNAMO_BACKEND", OFF, "compilation", "flow models have model.compile"),
)
MPI = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # mpirun tells its processes how many there are
# The beginning of accelerate's command line: accelerate launch, accelerate-launch or python -m accelerate.commands.launch.
LAUNCHER = re.compile(r"\baccelerate(-launch|\.commands\.launch|/commands/launch\.py|\S* launch)$")

LOGGER = logging.getLogger(__name__)


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuse what `accelerate launch` or its config asks for by the environment and a run would not do.

    Raises:
        InputError: names all of it, and what to set instead.
    """
    asked = [
        f"{what} ({variable}={environment[variable]}; {instead})"
        for variable, off, what, instead in UNHEARD
        if environment.get(variable, "").strip().lower() not in off
    ]
    if asked:
        raise InputError(
            f"accelerate's environment asks for {' and '.join(asked)}, which a run does not get from there"
        )


def check_alone(environment: Mapping[str, str]) -> None:
    """Refuse a process that `accelerate launch` has started alone where it was asked for several.

    Without a GPU for each (`--cpu`, `MULTI_CPU`) it starts one, tells it where all would meet, and leaves the others to
    mpirun. What it was asked for stands in its own command line and its config alone.

    Raises:
        InputError: it was asked for several.
    """
    waits = {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= environment.keys()
    if not waits or not environment.keys().isdisjoint({"WORLD_SIZE", *MPI}):
        return
    asked = next(filter(None, map(accelerate_asked, _ancestors())), None)
    if asked is None:
        LOGGER.warning(
            "accelerate launch set MASTER_ADDR, as it does for several processes, and this one is alone; if more were asked "
            "for, flowgrpo train ... run.processes=N starts N"
        )
        return
    processes, machines = asked
    if processes > 1:
        way = f"flowgrpo train ... run.processes={processes}"
        if machines > 1:
            way = f"torchrun --nnodes {machines} --nproc-per-node {processes // machines} ... -m flowgrpo train ..."
        raise InputError(
            f"accelerate launch was asked for {processes} processes and has started this one alone, as it does without a "
            f"GPU for each; {way} starts them"
        )


def accelerate_asked(words: Sequence[str]) -> tuple[int, int] | None:
    """Return the processes and machines that a command line of `accelerate launch` asks for, itself or by its config.

    Args:
        words: of a command line.

    Returns:
        1 each where nothing is asked for; None if it is another command line.
    """
    heads = [end for end in range(1, len(words) + 1) if LAUNCHER.search(" ".join(words[:end]))]
    if not heads:
        return None
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    try:
        asked, written = launch_command_parser().parse_args(words[heads[0] :]), None
    except SystemExit:  # another program of that name
        return None
    if asked.config_file is not None or (os.path.isfile(default_config_file) and not asked.cpu):
        written = load_config_from_file(asked.config_file)
    processes, machines = (
        getattr(asked, key) or getattr(written, key, 1) or 1 for key in ("num_processes", "num_machines")
    )
    return processes, machines


def _ancestors() -> Iterator[list[str]]:
    """The command lines of the process that started this one, of the one that started that, and so on."""
    with suppress(psutil.Error):  # one may end meanwhile
        yield from (process.cmdline() for process in psutil.Process().parents())


def shares_store(environment: Mapping[str, str]) -> bool:
    """Whether torchrun may start this run again with the store of the attempt before, as torch 2.15 does.

    The new processes then find addresses of those that have ended there, and wait for them or are refused.
    """
    restarts = int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    return restarts > 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def needed(processes: int) -> bool:
    """Whether this process should start others: several are asked for, and no launcher has started this one."""
    return processes > 1 and "WORLD_SIZE" not in os.environ


def check_gpus(processes: int) -> None:
    """Refuse to start more processes on this machine than it has GPUs, if it has any: each computes on a GPU of its own.

    Raises:
        InputError: there are fewer.
    """
    gpus = torch.accelerator.device_count()
    if 0 < gpus < processes and os.environ.get("ACCELERATE_USE_CPU", "").lower() in OFF:
        raise InputError(
            f"run.processes: {processes} need a GPU each, and this machine has {gpus}; set run.processes={gpus}, or hide "
            "GPUs from a run on the CPU: CUDA_VISIBLE_DEVICES= flowgrpo train ..."
        )


def command() -> list[str]:
    """The words that begin a command line like this one: of accelerate's launcher, where one has started this process."""
    if "WORLD_SIZE" not in os.environ or OURS in os.environ:
        return ["flowgrpo"]
    several = os.environ["WORLD_SIZE"] != "1"  # without --multi_gpu it starts one where there is no GPU for each
    switch = ["--multi_gpu"] if several else []
    return ["accelerate", "launch", *switch, "--num_processes", os.environ["WORLD_SIZE"], "-m", "flowgrpo"]


def is_restarted(begun_by: str | None) -> bool:
    """Whether torchrun has started this process again, or in a place of one that vanished, to go on with its run.

    Args:
        begun_by: the `TORCHELASTIC_RUN_ID` that a run was begun under; "none" is what torchrun calls a run without an id.
    """
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return again or (begun_by not in (None, "none") and begun_by == os.environ.get("TORCHELASTIC_RUN_ID"))


def is_main() -> bool:
    """Whether this process is the one that speaks."""
    return os.environ.get("RANK", "0") == "0"


def relaunch(processes: int, folder: Path) -> int:
    """Run this command line in so many processes and wait; returns the status of the first that did not end well, or 0.

    They talk over loopback alone.
    Ctrl-C and SIGTERM are passed on, so each process finishes its iteration. When one dies, the others are ended, and
    what it said is shown. When this process dies, they get SIGTERM; see `end_with_launcher`.

    Args:
        folder: of the run.

    Raises:
        InputError: this machine has fewer GPUs.
        Killed: the first that did not end well was ended by a signal.
    """
    check_gpus(processes)
    store = _store(processes)
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    shared = {
        OURS: str(os.getpid()),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),  # accelerate would write 1 there
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here, and no process opens one
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
    }
    shared["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    with tempfile.TemporaryDirectory() as place:
        heard = [open(os.path.join(place, str(rank)), "w+") for rank in range(processes)]  # noqa: SIM115
        children: list[subprocess.Popen] = []
        with _passed_on(children):
            children += [
                subprocess.Popen(
                    [sys.executable, "-m", "flowgrpo", *sys.argv[1:]],
                    env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stderr=None if rank == 0 else heard[rank],
                    start_new_session=True,  # a Ctrl-C reaches this process alone, which passes it on once
                )
                for rank in range(processes)
            ]
        failed = _first_failure(children)
        if failed is None:
            return 0
        status = children[failed].returncode
        if children[0].returncode != status:
            heard[failed].seek(0)
            words = heard[failed].read()
            head = "" if status == INTERRUPTED or not words else f"process {failed} of {processes} failed:\n"
            sys.stderr.write(head + words)
        if status < 0:
            rest, overrides = checkpoint.way_on(folder)
            said = f"process {failed} of {processes} was ended by {signal.Signals(-status).name}"
            raise Killed(said, rest, overrides, status=128 - status)
        return 1 if status == LOST else status


def end_with_launcher() -> None:
    """In a process that `relaunch` started: get SIGTERM when the launcher dies, so that the step is finished and saved.

    Nobody would end it otherwise, and it would hold the run's folder.
    """
    if OURS not in os.environ:
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl cannot tie this process to its launcher")
    if os.getppid() != int(os.environ[OURS]):  # it died before
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _passed_on(children: Sequence[subprocess.Popen]) -> Iterator[None]:
    """Start processes in which Ctrl-C waits until they can hear it (see `__main__`), and pass signals on to them then."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in children:
            child.send_signal(number)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
        for number in stop_reasons.heard((signal.SIGINT, signal.SIGTERM)):
            signal.signal(number, pass_on)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _store(processes: int) -> TCPStore:
    """The store where the processes find each other; torch's own would listen on all interfaces and ask for no token."""
    listening = socket.create_server(("127.0.0.1", 0))
    return distributed.TCPStore(
        "127.0.0.1",
        listening.getsockname()[1],
        processes,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def _first_failure(children: list[subprocess.Popen]) -> int | None:
    """Wait for all processes and return the rank that failed first, or None; the others then have `GRACE` seconds.

    Those that only lost another (`LOST`) did not fail by themselves.
    """
    failed, deadline = None, math.inf
    while True:
        waiting = None in [child.poll() for child in children]  # each is asked, one may have died beside a living one
        ended = [rank for rank, child in enumerate(children) if child.returncode]
        if ended and deadline == math.inf:
            deadline = time.monotonic() + GRACE
        if failed is None:
            failed = next((rank for rank in ended if children[rank].returncode != LOST), None)
        if not waiting:
            return failed if failed is not None or not ended else ended[0]
        if time.monotonic() > deadline:
            for child in children:
                child.kill()
        time.sleep(0.1)
