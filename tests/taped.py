"""A capture of calls without a GPU: operations that are repeated on the tensors and numbers of their first run."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

ASKING = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


def at_its_place(tree):
    """The tensors of a tree with the memory that they have now, also if their `data` is replaced later."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach(), tree)


class Tape(TorchDispatchMode):
    """What a CUDA graph has: operations, addresses, numbers. Like it, it refuses a number that the host asks for."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in ASKING:
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")
        given = at_its_place((args, kwargs or {}))
        made = function(*args, **(kwargs or {}))
        self.operations.append((function, given, at_its_place(made)))
        return made

    @torch.no_grad()
    def replay(self):
        for function, (args, kwargs), made in self.operations:
            for new, old in zip(tree_leaves(function(*args, **kwargs)), tree_leaves(made), strict=True):
                if isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr():  # no view, and not in place
                    old.copy_(new)


def capture(call):
    with Tape() as tape:
        outputs = call()
    return outputs, tape.replay
