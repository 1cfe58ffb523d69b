"""Compiled blocks of a network: one graph for calls with and without a gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._dynamo as dynamo
from accelerate.utils import compile_regions_fsdp2
from diffusers import ModelMixin
from torch.utils._pytree import tree_map_only

Function = Callable[..., Any]
SHAPES = 64  # graphs of a block, one for each shape of its inputs; calls of further shapes run eager


class CompiledBlocks:
    """Networks whose repeated blocks are compiled in place, so that peft and diffusers still see the same objects.

    Blocks compile at their first call. Compiled alone, calls without a gradient would have a graph of their own, which
    rounds elsewhere. Here they run the forward half of the graph that updates differentiate, so that the log-probability
    of a rollout is that of its update to the bit. What that half saves for a backward pass is dropped after each block.
    Each shape of a call has a graph of its own, so that a rollout's shape has its graph also after others came.

    Attributes:
        on: whether the networks compute with the compiled blocks; see `switch`.
    """

    def __init__(self, networks: Iterable[ModelMixin], backend: str | Function = "inductor"):
        dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, SHAPES)
        self.on = True
        self._compiled: dict[torch.nn.Module, Function] = {}
        for network in networks:
            if getattr(network, "_repeated_blocks", None):
                network.compile_repeated_blocks(backend=backend, dynamic=False)
            else:
                compile_regions_fsdp2(
                    network, backend=backend, dynamic=False
                )  # in place, unlike accelerate's compile_regions
            if network._compiled_call_impl is None:
                network.forward = self._as_in_updates(network.forward)
            else:  # a network without repeated blocks is compiled as a whole
                network._compiled_call_impl = self._as_in_updates(network._compiled_call_impl)
            for part in network.modules():
                if part._compiled_call_impl is not None:
                    self._compiled[part] = part._compiled_call_impl

    def switch(self, on: bool) -> None:
        """Let the networks compute with the compiled blocks, or as if nothing were compiled."""
        self.on = on
        for part, call in self._compiled.items():
            part._compiled_call_impl = call if on else None

    def _as_in_updates(self, call: Function) -> Function:
        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() or not self.on:
                return call(*args, **kwargs)
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_drop, _drop):
                return tree_map_only(torch.Tensor, torch.Tensor.detach, call(*args, **kwargs))

        return run


def _drop(saved: Any) -> Any:
    """Keep nothing of a tensor that is saved for a backward pass."""
    return None
