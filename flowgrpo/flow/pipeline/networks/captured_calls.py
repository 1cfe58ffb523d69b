"""Calls of a network without a gradient as CUDA graphs, for models whose kernels take less time than their launches.

A captured call is replayed by one launch. It runs the same kernels on the same numbers, so the log-probability of a
rollout stays that of its update. A graph reads fixed addresses. So each shape of the inputs has its own graph, as has each
set of weights and adapters (trained, averaged, reference). A call is computed as it is at first; the second of its kind is
captured; the third is computed both ways, and graphs are used from then on if the two are equal to the bit. A network that
cannot be captured, or whose graph differs, computes without graphs, and a warning says why.
"""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from typing_extensions import override

from flowgrpo.errors import InputError

Function = Callable[..., Any]
Capture = Callable[[Function], tuple[Any, Callable[[], None]]]  # calls once; returns the outputs, and how to replay
KEY = "model.cuda_graphs"
GRAPHS = 32  # of all networks; the graph that was used longest ago is dropped for another
PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)

LOGGER = logging.getLogger(__name__)


class CannotCapture(Exception):
    """The reason why a call has no graph."""


@dataclass(kw_only=True)
class Graph:
    """A captured call.

    Attributes:
        inputs: the tensors that it reads its arguments from.
        outputs: the tree with the tensors that it writes.
        replay: computes `outputs` from `inputs`.
        held: what it reads besides, kept alive.
        checked: whether a replay was compared with a call.
    """

    inputs: list[torch.Tensor]
    outputs: Any
    replay: Callable[[], None]
    held: list[Any]
    checked: bool = False

    def run(self, given: Iterable[torch.Tensor]) -> Any:
        """Return the outputs for other inputs, as a copy."""
        for own, other in zip(self.inputs, given, strict=True):
            own.copy_(other, non_blocking=True)
        self.replay()
        return tree_map_only(torch.Tensor, torch.clone, self.outputs)


class CapturedCalls:
    """Networks whose calls without a gradient are graphs; `capture` is that of `cuda_graphs`, unless a test has another.

    Raises InputError for a network that is compiled as a whole.

    Attributes:
        on: whether the networks use graphs; see `give_up`.
    """

    def __init__(self, networks: Iterable[torch.nn.Module], capture: Capture | None = None):
        self._capture = capture or cuda_graphs()
        self._graphs: OrderedDict[Hashable, Graph | None] = OrderedDict()  # None: such a call was made once
        self.on = True
        for network in networks:
            if network._compiled_call_impl is not None:
                raise InputError(f"{KEY}: {type(network).__name__} is compiled as a whole; set model.compile=false")
            network.forward = self._captured(network, network.forward)

    @property
    def replays(self) -> bool:
        """Whether there are graphs that were found equal to their calls."""
        return self.on and any(graph is not None and graph.checked for graph in self._graphs.values())

    def give_up(self, why: str) -> bool:
        """Free all graphs and make no others; warn with the reason. Return False if there were none to free."""
        freed, self.on = self.on and any(self._graphs.values()), False
        self._graphs.clear()
        LOGGER.warning("%s: calls are made without graphs from here on, because %s", KEY, why)
        return freed

    def _captured(self, network: torch.nn.Module, call: Function) -> Function:
        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.on or torch.is_grad_enabled():
                return call(*args, **kwargs)
            leaves, tree = tree_flatten((args, kwargs))
            try:
                key = (tree, *map(_outline, leaves), *_state(network))
                graph = self._graphs.get(key)
                if graph is None:
                    if key in self._graphs:
                        self._graphs[key] = self._graph(network, call, leaves, tree)
                    else:
                        self._keep(key)
                    return call(*args, **kwargs)
                self._graphs.move_to_end(key)
                made = graph.run(_tensors(leaves))
                if not graph.checked:
                    graph.checked, replayed, made = True, made, call(*args, **kwargs)
                    _check_equal(replayed, made)
                return made
            except CannotCapture as error:
                self.give_up(f"{type(network).__name__} {error}")
            return call(*args, **kwargs)

        return run

    def _keep(self, key: Hashable) -> None:
        if len(self._graphs) == GRAPHS:
            self._graphs.popitem(last=False)
        self._graphs[key] = None

    def _graph(self, network: torch.nn.Module, call: Function, leaves: Sequence[Any], tree: TreeSpec) -> Graph:
        inputs = [leaf.clone() for leaf in _tensors(leaves)]
        rest = iter(inputs)
        args, kwargs = tree_unflatten([next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], tree)
        try:
            with _Reads(inputs) as reads:
                call(*args, **kwargs)
            outputs, replay = self._capture(lambda: call(*args, **kwargs))
        except RuntimeError as error:  # of CUDA, out of memory among them
            raise CannotCapture(f"cannot be captured ({str(error).splitlines()[0]})") from error
        for leaf in tree_leaves(outputs):
            _outline(leaf)  # raises for one that cannot be copied
        held = [*reads.outside.values(), *_modules(network)]
        return Graph(inputs=inputs, outputs=outputs, replay=replay, held=held)


class _Reads(TorchDispatchMode):
    """Notes the storages that operations read and none of them made; raises CannotCapture if one of these is written."""

    def __init__(self, inputs: Iterable[torch.Tensor]):
        super().__init__()
        self.outside: dict[int, torch.UntypedStorage] = {}
        self._made = {
            ref.cdata: ref for ref in map(_reference, inputs)
        }  # a reference keeps its number from being reused

    @override
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        written = [
            tensor
            for schema, value in zip(function._schema.arguments, args, strict=False)
            if schema.alias_info is not None and schema.alias_info.is_write
            for tensor in _tensors(tree_leaves(value))
        ]
        if any(_reference(tensor).cdata not in self._made for tensor in written):
            raise CannotCapture(f"changes a tensor that it keeps, by {function}")
        for tensor in _tensors(tree_leaves((args, kwargs))):
            if (ref := _reference(tensor)).cdata not in self._made:
                self.outside[ref.cdata] = tensor.untyped_storage()
        self._made |= {
            ref.cdata: ref for ref in map(_reference, _tensors(tree_leaves(made))) if ref.cdata not in self.outside
        }
        return made


def cuda_graphs() -> Capture:
    """Return a function that captures calls as CUDA graphs in one pool of memory, whose peak is that of the largest."""
    pool = torch.cuda.graph_pool_handle()

    def capture(call: Function) -> tuple[Any, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        # Rewards may compute in other threads meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            outputs = call()
        return outputs, graph.replay

    return capture


def _outline(leaf: Any) -> Hashable:
    """Return what a graph is made for: the form of a tensor, or the value of a plain argument."""
    if isinstance(leaf, torch.Tensor):
        kind = leaf.device.type
        computes = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, computes
    if isinstance(leaf, PLAIN):
        return type(leaf), leaf
    raise CannotCapture(f"takes or returns an object of type {type(leaf).__name__}")


def _state(network: torch.nn.Module) -> Iterator[Hashable]:
    """Yield what changes if a network has other weights, layers or adapters than before."""
    for module in _modules(network):
        yield id(module)
        yield module._compiled_call_impl is None
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                yield None if tensor is None else tensor.data_ptr()
        if isinstance(module, BaseTunerLayer):
            layer: Any = module
            yield (layer.disable_adapters, *layer.active_adapters, *layer.scaling.values())


def _modules(network: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a network and all its layers, in less time than `modules`, which leaves out repeated ones."""
    rest = [network]
    while rest:
        module = rest.pop()
        yield module
        rest += [layer for layer in module._modules.values() if layer is not None]


def _tensors(leaves: Iterable[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _reference(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _check_equal(replayed: Any, made: Any) -> None:
    pairs = zip(_tensors(tree_leaves(replayed)), _tensors(tree_leaves(made)), strict=True)
    if not all(torch.allclose(one, other, rtol=0, atol=0, equal_nan=True) for one, other in pairs):
        raise CannotCapture("has other values in its graph than in its calls")
