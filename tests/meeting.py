"""Two processes that meet and write where they listen, which `test_launch` launches in place of runs."""

import json
import os
from pathlib import Path

import psutil
import torch
from torch import distributed

from flowgrpo import __main__ as program
from flowgrpo.commands import launch


def launcher():
    """Run as a command of `forked`."""
    program.entry = talk
    os._exit(launch.relaunch(2, Path()))


def talk():
    distributed.init_process_group("gloo")
    total = torch.tensor([1.0 + distributed.get_rank()])
    distributed.all_reduce(total)
    listening = [
        (c.laddr.ip, c.type.name)
        for process in (psutil.Process(), psutil.Process().parent())
        for c in process.net_connections()
        if not c.raddr
    ]
    distributed.barrier()
    Path(f"{distributed.get_rank()}.json").write_text(json.dumps([total.item(), listening]))
