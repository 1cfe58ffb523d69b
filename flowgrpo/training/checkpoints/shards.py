"""Tensors in shards as files: each process writes its own, by torch's distributed checkpoint in safetensors.

Any number of processes reads them back, each the parts that it holds, whether those are shards or the whole. Every file is
plain safetensors whose header says where its parts lie; nothing of it is pickled.
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
PART = 2**30  # bytes of a file of a process, about: torch makes a copy of each file in memory to write it
ALONE = "torch.distributed is .*, assuming the intent"  # what torch warns of where a process is alone


def files(folder: Path) -> list[Path]:
    """The files of a folder that hold shards."""
    return sorted(path for path in folder.iterdir() if FILE.fullmatch(path.name))


def writer(file: Path) -> int:
    """The number of the process that writes a file of a checkpoint: the first writes all that holds no shards."""
    found = FILE.fullmatch(file.name)
    return int(found[1]) - 1 if found else 0


def any_in(tensors: Iterable[Any]) -> bool:
    """Whether some tensor lies in shards."""
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def write(folder: Path, tensors: Mapping[str, torch.Tensor], peers: Peers) -> None:
    """Write this process's parts of tensors on the host; of what several processes hold alike the first writes it.

    Raises:
        Exception: a file could not be written, here or elsewhere; then it is raised on every process.
    """
    for known in ("TypedStorage is deprecated", ALONE):  # the first is of torch 2.9 itself
        warnings.filterwarnings("ignore", known)  # it stays, for a thread has no filters of its own
    processes = 1 if peers.group is None else distributed.get_world_size(peers.group)
    numbers = _numbers(tensors, processes * PART)
    try:
        dcp.save(
            dict(tensors),
            storage_writer=dcp.HuggingFaceStorageWriter(str(folder), numbers, save_distributed=True),
            planner=dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True),
            process_group=peers.group,
            no_dist=peers.group is None,
        )
    except dcp.CheckpointException as error:
        raise _cause(error) from error


def _numbers(tensors: Mapping[str, torch.Tensor], most: int) -> dict[str, int]:
    """The number, from 1, of the file that each tensor goes to: of all processes' parts together each has so many bytes."""
    numbers, number, filled = {}, 1, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if filled and filled + size > most:
            number, filled = number + 1, 0
        numbers[name], filled = number, filled + size
    return numbers


def shapes(folder: Path) -> dict[str, torch.Size]:
    """The shapes of the tensors, as wholes, by name."""
    found = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: tensor.size for name, tensor in found.items() if isinstance(tensor, dcp.TensorStorageMetadata)}


def read(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Read into tensors, shards or not, what `write` wrote of them, one part after the other; no other process is asked.

    Raises:
        Exception: a file cannot be read, or has not these tensors.
    """
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ALONE)
            dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    except dcp.CheckpointException as error:
        raise _cause(error) from error


def _cause(error: dcp.CheckpointException) -> BaseException:
    """What failed first; torch's own exception is not an `Exception`, and tells it with a traceback in its words."""
    return next(iter(error.failures.values()))[0]
