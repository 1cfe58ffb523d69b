"""Networks of real size without numbers: what they allocate is counted, and nothing is loaded or computed.

Inside a hollow network tensors are torch's fake ones: shapes and types, without values. Around it everything is real and as
ever: what goes in is made fake, and zeros come out, tied to the fake result, so that a backward pass which reaches them
runs through the network, too. Whole numbers and vectors stay real inside, for they steer (masks, lengths, times).

The pretended device is a CPU: the attention that fake tensors take there keeps what a GPU's flash attention keeps, where a
pretended GPU would take another.
"""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import Any

import accelerate
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Tensor = torch.Tensor
# What networks ask of numbers that do not exist, as zeros would answer: whether all are nothing, whether any is broken.
ANSWERED = {torch.ops.aten.all.default: True, torch.ops.aten.any.default: False}


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that operations allocate while it is entered, until they are freed."""

    def __init__(self):
        super().__init__()
        self._now = self._most = self._start = 0
        self._sizes: dict[int, int] = {}

    @property
    def now(self) -> int:
        """Bytes allocated and not freed since `restart`."""
        return self._now - self._start

    @property
    def peak(self) -> int:
        """The most that `now` has been."""
        return self._most - self._start

    def restart(self) -> None:
        """Count from 0 again, whatever is allocated."""
        self._start = self._most = self._now

    def ignore(self, tensor: Tensor) -> None:
        """Leave a tensor that stays, a weight, out of the count."""
        self._sizes[tensor.untyped_storage()._cdata] = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.index.Tensor and isinstance(args[0], FakeTensor):
            args = (args[0], _places(args[1]))
        if function in ANSWERED and isinstance(args[0], FakeTensor):
            return torch.tensor(ANSWERED[function])
        if function is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            raise NotImplementedError(f"a value of {tuple(args[0].shape)} numbers that do not exist is read")
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            weakref.finalize(storage, self._drop, key)
            self._now += self._sizes[key]
            self._most = max(self._most, self._now)

    def _drop(self, key: int) -> None:
        self._now -= self._sizes.pop(key, 0)


def _places(indices: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Indices with real masks as the places where they are true, so that the shape of the result is known."""
    places: list[Tensor | None] = []
    for index in indices:
        mask = index is not None and index.dtype == torch.bool and not isinstance(index, FakeTensor)
        places += index.nonzero(as_tuple=True) if mask else [index]
    return places


class _Bridge(torch.autograd.Function):
    """Real zeros in the place of fake results; their gradient starts the backward pass of the fake ones."""

    @staticmethod
    def forward(ctx, anchor: Tensor, hollow: Hollow, results: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.hollow, ctx.results = hollow, results
        return tuple(_zeros(x) for x in results)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[None, ...]:
        results, ctx.results = [x for x in ctx.results if x.requires_grad], None
        with ctx.hollow.inside():
            torch.autograd.backward(results, [torch.ones_like(x) for x in results])
        return None, None, None


class Hollow:
    """Makes hollow networks, and counts what they allocate.

    A call that only repeats an earlier one of the same shapes is not run again: without gradients it allocates nothing that
    stays, and with gradients (a second branch of guidance) as much stays as of the first.

    Attributes:
        live: the count.
    """

    def __init__(self):
        self.live, self._mode = Live(), FakeTensorMode(allow_non_fake_inputs=True)
        self._anchor = torch.zeros((), requires_grad=True)
        self._depth = 0
        self._seen: dict[Any, tuple[Any, int]] = {}  # what a call returned, and the bytes that stayed
        self._again: list[Tensor] = []

    def empty(self, module: torch.nn.Module, entrances: Iterable[str] = ("forward",)) -> None:
        """Give a network that was built on the device meta fake weights, which are not counted.

        Args:
            module: changed in place; its parameters are new ones.
            entrances: the methods that are called from outside.
        """
        for part in module.modules():
            for name, p in part._parameters.items():
                if p is not None:
                    part._parameters[name] = torch.nn.Parameter(self._fresh(p), requires_grad=p.requires_grad)
            for name, b in part._buffers.items():
                if b is not None and b.is_floating_point() and b.ndim > 1:
                    part._buffers[name] = self._fresh(b)
        for name in entrances:
            if hasattr(module, name):
                setattr(module, name, self._door(getattr(module, name)))

    def with_gradients(self, modules: Iterable[torch.nn.Module]) -> None:
        """Give trained weights gradients, as they have them from the second micro-batch on; they are not counted."""
        for p in (p for module in modules for p in module.parameters() if p.requires_grad):
            p.grad = self._fresh(p)

    @contextmanager
    def phase(self) -> Iterator[Live]:
        """Forget earlier calls; what is allocated inside this context is counted from 0."""
        self._seen, self._again = {}, []
        gc.collect()
        self.live.restart()
        yield self.live
        self._seen, self._again = {}, []

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Return a context in which what is allocated is counted."""
        self._depth += 1
        try:
            with self.live if self._depth == 1 else nullcontext():
                yield
        finally:
            self._depth -= 1

    def _fresh(self, like: Tensor) -> Tensor:
        with self._mode:
            empty = torch.empty(like.shape, dtype=like.dtype)
        self.live.ignore(empty)
        return empty

    def _door(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._depth:  # called by another method, or by a block that is computed again
                return method(*args, **kwargs)
            shapes: list[Any] = []
            mapped(lambda x: shapes.append((x.shape, x.dtype)), (args, kwargs))
            key = (id(method), torch.is_grad_enabled(), tuple(shapes))
            if key in self._seen:
                return self._repeated(*self._seen[key])
            before = self.live.now
            with self.inside():
                out = method(*mapped(self._fake, args), **mapped(self._fake, kwargs))
            self._seen[key] = (
                mapped(lambda x: torch.zeros((), dtype=x.dtype).expand(x.shape), out),
                self.live.now - before,
            )
            return self._real(out)

        return run

    def _repeated(self, out: Any, stayed: int) -> Any:
        if torch.is_grad_enabled():
            with self.inside(), self._mode:
                self._again.append(torch.empty(stayed, dtype=torch.uint8))
        return mapped(Tensor.clone, out)

    def _real(self, out: Any) -> Any:
        """What a network returns, with real zeros in the place of its fake results."""
        found: list[Tensor] = []
        mapped(found.append, out)
        learns = torch.is_grad_enabled() and any(x.requires_grad for x in found)
        real = iter(_Bridge.apply(self._anchor, self, found) if learns else map(_zeros, found))
        return mapped(lambda _: next(real), out)

    def _fake(self, x: Tensor) -> Tensor:
        """A float tensor of three dimensions or more as a fake one; any other as it is, masks of floats among them."""
        if isinstance(x, FakeTensor) or not x.is_floating_point() or x.ndim < 3:
            return x
        return self._mode.from_tensor(x.detach())


def built(make: Callable[[], torch.nn.Module], dtype: torch.dtype) -> torch.nn.Module:
    """A network of `dtype` with its parameters on the device meta, as its class makes it of a config.

    What its class keeps in float32 stays so, as where `from_pretrained` loads it; what is no parameter has its values.
    """
    with accelerate.init_empty_weights():
        network = make()
    if hasattr(network, "tie_weights"):
        network.tie_weights()
    whole = () if hasattr(network, "tie_weights") else getattr(network, "_keep_in_fp32_modules", None) or ()
    for name, p in network.named_parameters():
        p.data = p.data.to(torch.float32 if any(part in name.split(".") for part in whole) else dtype)
    for part in network.modules():
        for name, b in part._buffers.items():
            if name not in part._non_persistent_buffers_set and b is not None and b.is_floating_point():
                part._buffers[name] = b.to(dtype)
    return network.eval()


def size(network: torch.nn.Module) -> int:
    """Bytes of the weights and buffers of a network."""
    tensors = [*network.parameters(), *network.buffers()]
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def mapped(change: Callable[[Tensor], Any], value: Any) -> Any:
    """A value with each of its tensors changed: in lists, maps, dataclasses, and the objects that networks return."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (torch.Generator, torch.nn.Module, type)) or callable(value):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(change, x) for x in value))
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(change, x) for x in value)
    if is_dataclass(value):
        return replace(value, **{f.name: mapped(change, getattr(value, f.name)) for f in fields(value) if f.init})
    if isinstance(value, Mapping):
        return type(value)({key: mapped(change, x) for key, x in value.items()})
    if any(
        isinstance(x, Tensor) for x in getattr(value, "__dict__", {}).values()
    ):  # the distribution of a VAE's latents
        changed = copy.copy(value)
        vars(changed).update({key: mapped(change, x) for key, x in vars(value).items()})
        return changed
    return value


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=x.dtype)
