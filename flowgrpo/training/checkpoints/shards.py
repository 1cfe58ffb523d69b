"""Sharded tensors in safetensors files, by torch's distributed checkpoint; nothing is pickled.

Each process writes its own files. Any number of processes can read them, and each reads only the parts that it holds.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.training.distributed.agreement import Peers

if TYPE_CHECKING:
    from torch.distributed import checkpoint as dcp
else:
    dcp = lazy("torch.distributed.checkpoint")

FILE = re.compile(r"shard-(\d{5})-model-\d{5}-of-\d{5}\.safetensors", re.ASCII)
PART = 2**30  # approximate bytes of a file; torch copies each file in memory to write it
ALONE = "torch.distributed is .*, assuming the intent"  # torch's warning in a process without a process group


def files(folder: Path) -> list[Path]:
    """Return the shard files of a folder, sorted."""
    return sorted(path for path in folder.iterdir() if FILE.fullmatch(path.name))


def writer(file: Path) -> int:
    """Return the rank that writes a file of a checkpoint; 0 for files that hold no shards."""
    match = FILE.fullmatch(file.name)
    return int(match[1]) - 1 if match else 0


def any_in(tensors: Iterable[Any]) -> bool:
    """Return whether any of the tensors is sharded."""
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def write(folder: Path, tensors: Mapping[str, torch.Tensor], peers: Peers) -> None:
    """Write this process's parts of tensors in host memory; an error on one process is raised on all.

    A part that several processes hold is written once.
    """
    for known in ("TypedStorage is deprecated", ALONE):  # torch 2.9 itself causes the first
        warnings.filterwarnings("ignore", known)  # permanently: a thread cannot restore filters safely
    processes = 1 if peers.group is None else distributed.get_world_size(peers.group)
    try:
        dcp.save(
            dict(tensors),
            storage_writer=dcp.HuggingFaceStorageWriter(
                str(folder), _number_files(tensors, processes * PART), save_distributed=True
            ),
            planner=dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True),
            process_group=peers.group,
            no_dist=peers.group is None,
        )
    except dcp.CheckpointException as error:
        raise _first_failure(error) from error


def _number_files(tensors: Mapping[str, torch.Tensor], limit: int) -> dict[str, int]:
    """Return the number, from 1, of each tensor's file. A file has at most `limit` unsharded bytes, or a single tensor."""
    numbers, number, filled = {}, 1, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if filled and filled + size > limit:
            number, filled = number + 1, 0
        numbers[name], filled = number, filled + size
    return numbers


def shapes(folder: Path) -> dict[str, torch.Size]:
    """Return the unsharded shapes of all tensors by name."""
    metadata = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: tensor.size for name, tensor in metadata.items() if isinstance(tensor, dcp.TensorStorageMetadata)}


def read(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Read into `tensors`, sharded or whole, part by part and without communication; raise if one is missing."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ALONE)
            dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    except dcp.CheckpointException as error:
        raise _first_failure(error) from error


def _first_failure(error: dcp.CheckpointException) -> BaseException:
    """Return the cause of torch's exception. Torch's own is no `Exception`, and its message contains a traceback."""
    return next(iter(error.failures.values()))[0]
