"""Multi-process runs: start the same command line once per process, with the environment that accelerate reads."""

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

GRACE = 20  # seconds that the other processes have to end after one failed
OURS = "FLOWGRPO_LAUNCHED"  # environment variable of the processes that `relaunch` starts: the launcher's process id
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
INTERRUPTED = 130  # exit status after Ctrl-C
LOST = 3  # exit status of a process that ends because another has ended; `relaunch` never returns it

GPU = Path("/dev/nvidia0")  # where the driver shows the first GPU
OFF = ("", "0", "false", "no", "off", "n", "f")
# Settings of accelerate's environment that a run ignores: variable, values that switch it off, name, replacement.
UNHEARD = (
    ("ACCELERATE_MIXED_PRECISION", OFF, "mixed precision", "set model.dtype"),
    ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", (*OFF, "1"), "gradient accumulation", "set train.micro_batch"),
    ("ACCELERATE_USE_FSDP", OFF, "FSDP", "set run.sharding"),
    ("ACCELERATE_USE_DEEPSPEED", OFF, "DeepSpeed", "there is run.sharding instead"),
    ("ACCELERATE_USE_MEGATRON_LM", OFF, "Megatron-LM", "there is run.sharding instead"),
    (
        "ACCELERATE_USE_PARALLELISM_CONFIG",
        OFF,
        "a parallelism config",
        "there are run.sharding and run.context_parallel instead",
    ),
    ("ACCELERATE_DYNAMO_BACKEND", OFF, "compilation", "flow models have model.compile"),
)
MPI = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # number of processes, set by mpirun
# Start of accelerate's command line: accelerate launch, accelerate-launch or python -m accelerate.commands.launch.
LAUNCHER = re.compile(r"\baccelerate(-launch|\.commands\.launch|/commands/launch\.py|\S* launch)$")

LOGGER = logging.getLogger(__name__)


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuse settings that `accelerate launch` passes in the environment and that a run would ignore."""
    asked = [
        f"{name} ({variable}={environment[variable]}; {instead})"
        for variable, off, name, instead in UNHEARD
        if environment.get(variable, "").strip().lower() not in off
    ]
    if asked:
        raise InputError(
            f"accelerate's environment asks for {' and '.join(asked)}, which a run does not get from there"
        )


def check_alone(environment: Mapping[str, str]) -> None:
    """Refuse a single process that `accelerate launch` started although several were requested.

    accelerate starts only one process if there is no GPU for each. The requested number is read from its command
    line or config.
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
    """Return the numbers of processes and machines that `accelerate launch` was asked for; None for other command lines."""
    heads = [end for end in range(1, len(words) + 1) if LAUNCHER.search(" ".join(words[:end]))]
    if not heads:
        return None
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    try:
        options, config = launch_command_parser().parse_args(words[heads[0] :]), None
    except SystemExit:  # another program of that name
        return None
    if options.config_file is not None or (os.path.isfile(default_config_file) and not options.cpu):
        config = load_config_from_file(options.config_file)
    processes, machines = (
        getattr(options, key) or getattr(config, key, 1) or 1 for key in ("num_processes", "num_machines")
    )
    return processes, machines


def _ancestors() -> Iterator[list[str]]:
    """Yield the command lines of the parent process, of its parent, and so on."""
    with suppress(psutil.Error):  # one may end meanwhile
        yield from (process.cmdline() for process in psutil.Process().parents())


def shares_store(environment: Mapping[str, str]) -> bool:
    """Return whether a restart by torchrun would reuse the store of the previous attempt, as torch 2.15 does.

    The store still holds addresses of processes that have ended, so the new ones would wait or be refused.
    """
    restarts = int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    return restarts > 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def needs_relaunch(processes: int) -> bool:
    """Return whether this process has to start others: several are asked for and no launcher has started this one."""
    return processes > 1 and "WORLD_SIZE" not in os.environ


def check_gpus(processes: int) -> None:
    """Refuse more processes than this machine has GPUs, if it has any."""
    gpus = torch.accelerator.device_count()
    if 0 < gpus < processes and os.environ.get("ACCELERATE_USE_CPU", "").lower() in OFF:
        raise InputError(
            f"run.processes: {processes} need a GPU each, and this machine has {gpus}; set run.processes={gpus}, or hide "
            "GPUs from a run on the CPU: CUDA_VISIBLE_DEVICES= flowgrpo train ..."
        )


def check_usable(environment: Mapping[str, str]) -> None:
    """Refuse a run on the CPU of a machine whose GPU PyTorch cannot use, unless GPUs are hidden from it."""
    on_cpu = (
        environment.get("ACCELERATE_USE_CPU", "").lower() not in OFF or environment.get("CUDA_VISIBLE_DEVICES") == ""
    )
    if GPU.exists() and not on_cpu and not torch.accelerator.is_available():
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        raise InputError(
            f"PyTorch {torch.__version__} cannot use the GPU of this machine, it {built}; install a build that fits the "
            "driver, or train on the CPU: CUDA_VISIBLE_DEVICES= flowgrpo train ..."
        )


def command() -> list[str]:
    """Return the first words of a command line that starts this run again, with accelerate's launcher if it was used."""
    if "WORLD_SIZE" not in os.environ or OURS in os.environ:
        return ["flowgrpo"]
    several = os.environ["WORLD_SIZE"] != "1"  # without --multi_gpu accelerate starts one if GPUs are too few
    switch = ["--multi_gpu"] if several else []
    return ["accelerate", "launch", *switch, "--num_processes", os.environ["WORLD_SIZE"], "-m", "flowgrpo"]


def is_restarted(begun_by: str | None) -> bool:
    """Return whether torchrun restarted this process, or replaced one that vanished, to resume its run.

    `begun_by` is the `TORCHELASTIC_RUN_ID` under which the run began; torchrun sets it to "none" if it is given no id.
    """
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return again or (begun_by not in (None, "none") and begun_by == os.environ.get("TORCHELASTIC_RUN_ID"))


def is_main() -> bool:
    """Return whether this process is rank 0, which prints."""
    return os.environ.get("RANK", "0") == "0"


def relaunch(processes: int, folder: Path) -> int:
    """Run this command line in several processes that talk over loopback; return the first failure's status, or 0.

    Ctrl-C and SIGTERM are passed on, so that each process finishes its iteration. When one process dies, the others are
    ended and its stderr is shown. When this process dies, they get SIGTERM (`end_with_launcher`).

    Raises:
        InputError: this machine has fewer GPUs.
        Killed: a signal ended the process that failed first.
    """
    check_gpus(processes)
    store = _open_store(processes)
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    shared = {
        OURS: str(os.getpid()),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),  # accelerate would set 1
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is in this process, so rank 0 opens none
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes))),
    }
    with tempfile.TemporaryDirectory() as place:
        logs = [open(os.path.join(place, str(rank)), "w+") for rank in range(processes)]  # noqa: SIM115
        children: list[subprocess.Popen] = []
        with _passing_signals(children):
            children += [
                subprocess.Popen(
                    [sys.executable, "-m", "flowgrpo", *sys.argv[1:]],
                    env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stderr=None if rank == 0 else logs[rank],
                    start_new_session=True,  # Ctrl-C reaches this process only, which passes it on once
                )
                for rank in range(processes)
            ]
        failed = _first_failure(children)
        if failed is None:
            return 0
        status = children[failed].returncode
        if children[0].returncode != status:
            logs[failed].seek(0)
            words = logs[failed].read()
            head = "" if status == INTERRUPTED or not words else f"process {failed} of {processes} failed:\n"
            sys.stderr.write(head + words)
        if status < 0:
            rest, overrides = checkpoint.way_on(folder)
            sentence = f"process {failed} of {processes} was ended by {signal.Signals(-status).name}"
            raise Killed(sentence, rest, overrides, status=128 - status)
        return 1 if status == LOST else status


def end_with_launcher() -> None:
    """Let the kernel send SIGTERM to this process when its launcher dies, so that the run saves and ends.

    Otherwise this process would keep the run's folder locked. Only processes that `relaunch` started have a launcher.
    """
    if OURS not in os.environ:
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl cannot tie this process to its launcher")
    if os.getppid() != int(os.environ[OURS]):  # the launcher died before the call
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _passing_signals(children: Sequence[subprocess.Popen]) -> Iterator[None]:
    """Block SIGINT while children start (see `__main__`), then pass SIGINT and SIGTERM on to them."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in children:
            child.send_signal(number)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
        for number in stop_reasons.unignored_signals((signal.SIGINT, signal.SIGTERM)):
            signal.signal(number, pass_on)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _open_store(processes: int) -> TCPStore:
    """Open the rendezvous store on loopback; the one that torch opens listens on all interfaces without a token."""
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
    """Wait for all processes, at most `GRACE` seconds after one failed; return the rank that failed first, or None.

    A process with the status `LOST` ended because of another one, and counts only if all failures have that status.
    """
    failed, deadline = None, math.inf
    while True:
        running = None in [child.poll() for child in children]  # polls all: `any` would stop at a living one
        ended = [rank for rank, child in enumerate(children) if child.returncode]
        if ended and deadline == math.inf:
            deadline = time.monotonic() + GRACE
        if failed is None:
            failed = next((rank for rank in ended if children[rank].returncode != LOST), None)
        if not running:
            return failed if failed is not None or not ended else ended[0]
        if time.monotonic() > deadline:
            for child in children:
                child.kill()
        time.sleep(0.1)
