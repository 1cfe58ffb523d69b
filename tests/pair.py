"""Functions that run in two processes at once, as a run of two does."""

import os
from datetime import timedelta
from pathlib import Path

import forked
import torch
from torch import distributed

CONTEXT = forked.CONTEXT


def pair(function, folder, *, seconds=60):
    """What a function of the rank returns in each of two processes; of one that raises, the error's name and words.

    Args:
        function: of a module that lies in tests/, where the processes find it.
        folder: an empty one.
        seconds: after which a process that waits for the other gives up.
    """
    processes = [CONTEXT.Process(target=_one, args=(function, rank, str(folder), seconds)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(2)]


def _one(function, rank, folder, seconds):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=seconds)
    )
    try:
        found = function(rank)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    torch.save(found, Path(folder, str(rank)))
    os._exit(0)
