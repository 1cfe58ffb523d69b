"""Calls of a network without a gradient as CUDA graphs, for models whose kernels take less time than their launches.

A captured call is replayed by one launch. It runs the same kernels on the same numbers, so the log-probability of a
rollout stays that of its update. A graph reads fixed addresses and repeats what the host knew. So each kind of call has its
own graph: shapes and plain arguments, and a set of weights and adapters (trained, averaged, reference). The first call of a
kind is computed as it is; the second is examined and captured; the third is computed both ways, and graphs are used from
then on if the two are equal to the bit. A network that keeps something from call to call, computes with tensors of the host
or asks for a number has no graph. It computes without, and a warning says why.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
GRAPHS = 32  # of all networks; calls of further kinds are made as they are
PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
ATEN = torch.ops.aten
ASKING = (ATEN._local_scalar_dense.default, ATEN.nonzero.default, ATEN.equal.default)  # the host waits for their result

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
        held: the layers, and other tensors that it reads, kept alive.
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
        self._seen: set[int] = set()  # hashes of the kinds of calls
        self._graphs: dict[Hashable, Graph] = {}
        self.on, self._full = True, False
        for network in networks:
            if network._compiled_call_impl is not None:
                raise InputError(f"{KEY}: {type(network).__name__} is compiled as a whole; set model.compile=false")
            network.forward = self._captured(network, network.forward)

    @property
    def replays(self) -> bool:
        """Whether there are graphs that were found equal to their calls."""
        return any(graph.checked for graph in self._graphs.values())

    def give_up(self, why: str) -> bool:
        """Free all graphs and make no others; warn with the reason. Return False if there were none to free."""
        freed = bool(self._graphs)
        self._graphs.clear()
        if self.on:
            LOGGER.warning("%s: calls are made without graphs from here on, because %s", KEY, why)
        self.on = False
        return freed

    def _captured(self, network: torch.nn.Module, call: Function) -> Function:
        layers = Layers(network)

        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.on or torch.is_grad_enabled():
                return call(*args, **kwargs)
            try:
                leaves, tree = tree_flatten((args, kwargs))
                key = (tree, *map(_outline, leaves), *layers.state())
                graph = self._graphs.get(key)
                if graph is None:
                    if self._is_due(hash(key)):
                        self._graphs[key] = self._graph(layers, call, leaves, tree)
                    return call(*args, **kwargs)
                made = graph.run(_tensors(leaves))
                if not graph.checked:
                    replayed, made = made, call(*args, **kwargs)
                    _check_equal(replayed, made)
                    graph.checked = True
                return made
            except CannotCapture as error:
                self.give_up(f"{type(network).__name__} {error}")
            return call(*args, **kwargs)

        return run

    def _is_due(self, kind: int) -> bool:
        """Return whether a kind of call that has no graph gets one: when it comes a second time and there is room."""
        if kind not in self._seen:
            self._seen.add(kind)
            return False
        if len(self._graphs) < GRAPHS:
            return True
        if not self._full:
            LOGGER.warning("%s: %d kinds of calls have graphs, the others are made without", KEY, GRAPHS)
        self._full = True
        return False

    def _graph(self, layers: Layers, call: Function, leaves: Sequence[Any], tree: TreeSpec) -> Graph:
        inputs = [leaf.clone() for leaf in _tensors(leaves)]
        rest = iter(inputs)
        args, kwargs = tree_unflatten([next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], tree)
        try:
            with layers.unchanged(), Examination(layers.tensors()[0].device) as examined:
                call(*args, **kwargs)
            outputs, replay = self._capture(lambda: call(*args, **kwargs))
        except RuntimeError as error:  # of CUDA, out of memory among them
            cause: BaseException = error
            while cause.__context__ is not None:  # leaving a failed capture raises another error
                cause = cause.__context__
            raise CannotCapture(f"cannot be captured ({str(cause).partition(chr(10))[0]})") from error
        for leaf in tree_leaves(outputs):
            _outline(leaf)  # raises for one that cannot be copied
        own = {_reference(tensor).cdata for tensor in layers.tensors()}  # may be replaced, since calls look at them
        held = [storage for number, storage in examined.outside.items() if number not in own]
        return Graph(inputs=inputs, outputs=outputs, replay=replay, held=[*held, *layers.modules])


class Layers:
    """A network's layers and tensors, which are looked through before each call.

    Options, attention processors and hooks are taken as fixed: a run sets them before its first rollout.
    """

    def __init__(self, network: torch.nn.Module):
        self._network = network
        self._list()

    def _list(self) -> None:
        self.modules = list(self._network.modules())
        self._children = [module._modules for module in self.modules if module._modules]
        self._held = [each for m in self.modules for each in (m._parameters, m._buffers) if each]
        self._adapters: list[Any] = [module for module in self.modules if isinstance(module, BaseTunerLayer)]
        self._ids = self._identify()

    def _identify(self) -> tuple[int, ...]:
        return tuple(id(child) for children in self._children for child in children.values())

    def tensors(self) -> list[torch.Tensor]:
        """Return the network's parameters and buffers."""
        return [tensor for held in self._held for tensor in held.values() if tensor is not None]

    def state(self) -> Iterator[Hashable]:
        """Yield what changes if the network has other layers, weights or adapters than before."""
        if self._identify() != self._ids:
            self._list()
        yield self._ids
        yield tuple(module.training for module in self.modules)
        yield tuple(0 if tensor is None else tensor.data_ptr() for held in self._held for tensor in held.values())
        for layer in self._adapters:
            yield (layer.disable_adapters, layer.merged, *layer.active_adapters, *layer.scaling.values())

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Return a context at whose exit each layer must have the attributes of before; else it raises CannotCapture."""
        before = [dict(vars(module)) for module in self.modules]
        yield
        for module, attributes in zip(self.modules, before, strict=True):
            for name, value in vars(module).items():
                if attributes.get(name) is not value:
                    raise CannotCapture(f"keeps {name} of {type(module).__name__} from call to call")


class Examination(TorchDispatchMode):
    """A look at the operations of a call on `device`. Raises CannotCapture for one that a graph would not repeat.

    Attributes:
        outside: the storages that operations read and none of them made.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.outside: dict[int, torch.UntypedStorage] = {}
        self._device = device
        self._made: dict[int, StorageWeakRef] = {}  # a reference keeps its number from being reused

    @override
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in ASKING:
            raise CannotCapture(f"asks for a number, by {function}")
        for place, argument in enumerate(function._schema.arguments):
            value = kwargs.get(argument.name, args[place] if place < len(args) else None)
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in _tensors(tree_leaves(value)):
                    if _reference(tensor).cdata not in self._made:
                        raise CannotCapture(f"changes a tensor that it did not make, by {function}")
        made = function(*args, **kwargs)
        given, results = (_tensors(tree_leaves(each)) for each in ((args, kwargs), made))
        if any(tensor.device != self._device for tensor in (*given, *results)):
            raise CannotCapture(f"computes with a tensor that is not on {self._device}, by {function}")
        for tensor in given:
            if (ref := _reference(tensor)).cdata not in self._made:
                self.outside[ref.cdata] = tensor.untyped_storage()
        self._made |= {ref.cdata: ref for ref in map(_reference, results) if ref.cdata not in self.outside}
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


def _tensors(leaves: Iterable[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _reference(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _check_equal(replayed: Any, made: Any) -> None:
    """Raise CannotCapture unless two results are equal to the bit, strides and plain values too."""
    for one, other in zip(tree_leaves(replayed), tree_leaves(made), strict=True):
        equal = _outline(one) == _outline(other)
        if equal and isinstance(one, torch.Tensor):
            equal = torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
        if not equal:
            raise CannotCapture("has other values in its graph than in its calls")
