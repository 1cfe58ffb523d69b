"""Folders of stored groups, written by hand."""

import torch

from flowgrpo.data import stored
from flowgrpo.data.prompts import Prompt


def group(text, rewards, *, first_seed=0, lost=(), **columns):
    """Make a group of a prompt, with as many samples as rewards (K, R)."""
    values = torch.tensor(rewards, dtype=torch.float64)
    values = values[:, None] if values.ndim == 1 else values
    return stored.Group(
        prompt=Prompt(text, columns),
        seeds=[first_seed + i for i in range(len(values))],
        rewards=values,
        lost=torch.tensor([i in lost for i in range(len(values))]),
    )


def write(folder, groups, names=("closeness",), **about):
    whole = {"kind": "samples", "model": "field", "fingerprint": "none", "dtype": "float32", "call": {}, **about}
    writer = stored.Writer(folder, whole, names)
    writer.add(groups)
    return writer.finish({})
