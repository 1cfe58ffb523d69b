"""Functions that run in two or more processes at once, as a run of as many does."""

import os
from datetime import timedelta
from pathlib import Path

import forked
import torch
from torch import distributed


def pair(function, folder, *, seconds=60, processes=2):
    """Return what a function of the rank, from a module in tests/, returns in each process.

    A raised error gives its name and words, an ended process None. `seconds` limits the wait for the others.
    """
    options = (str(folder), seconds, processes)
    running = [forked.process(_one, function, rank, *options) for rank in range(processes)]
    for process in running:
        process.join()
    files = [Path(folder, str(rank)) for rank in range(processes)]
    return [torch.load(file, weights_only=False) if file.exists() else None for file in files]


def _one(function, rank, folder, seconds, processes):
    os.environ |= {
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }  # accelerate asks for all
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=seconds),
    )
    try:
        found = function(rank)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    torch.save(found, Path(folder, str(rank)))
    os._exit(0)
