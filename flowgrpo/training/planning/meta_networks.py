"""Networks of real size without values, to count the allocations of their calls. Nothing is loaded or computed.

Inside such a network, tensors are torch's fake tensors, which have only shapes and dtypes. Everything outside is real.
Float inputs become fake. Outputs become real zeros that are linked to the fake results, so that a backward pass runs
through the network. Integers and vectors (masks, lengths, times) stay real inside, because they control the
computation.

The fake device is a CPU, since its attention kernel saves the same tensors as a GPU's flash attention. A fake GPU would
use another kernel.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import accelerate
import torch
import transformers
from peft import LoraConfig
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from flowgrpo.data.tensor_maps import map_tensors
from flowgrpo.schema.lora import Lora
from flowgrpo.training.planning.allocation_counter import AllocationCounter
from flowgrpo.training.weights.lora_adapters import Adapter
from flowgrpo.training.weights.trained_weights import Weights, lora_config

Tensor = torch.Tensor
TABLE = 2**24  # elements of the largest table that is computed when a network is built
BROADCAST = 2**12  # operands with fewer elements than this are assumed not to give a table larger than `TABLE`
PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


class _Bridge(torch.autograd.Function):
    """An autograd function that returns real zeros for fake results. Its backward pass runs that of the fake results."""

    @staticmethod
    def forward(ctx, anchor: Tensor, networks: MetaNetworks, results: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.networks, ctx.results = networks, results
        return tuple(_zeros(x) for x in results)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[None, ...]:
        results, ctx.results = [x for x in ctx.results if x.requires_grad], None
        with ctx.networks.inside():
            torch.autograd.backward(results, [torch.ones_like(x) for x in results])
        return None, None, None


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The effect of one run of a block: its allocations, FLOPs, launches and outputs."""

    by: Callable[..., Any]  # the block's forward method
    fixed: int  # fixed bytes that stayed alive, without the outputs
    each: int  # bytes per row that stayed alive, without the outputs
    operations: int
    launches: int
    outputs: list[Any]  # each leaf is the index of an input, or (shape, dtype, requires_grad), or None
    form: TreeSpec  # structure of the outputs


class _RepeatedBlock(torch.autograd.Function):
    """A stand-in for a block that equals an earlier one: it returns fake outputs and saves as many bytes for backward."""

    @staticmethod
    def forward(ctx, outlines: list[Any], kept: list[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*kept, *inputs)
        like = next(x for x in inputs if isinstance(x, FakeTensor))
        outputs = tuple(like.new_empty(shape, dtype=dtype) for shape, dtype, _ in outlines)
        ctx.mark_non_differentiable(*(x for x, (*_, learns) in zip(outputs, outlines, strict=True) if not learns))
        return outputs

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        inputs = ctx.saved_tensors[-len(needed) :]
        return None, None, *(torch.empty_like(x) if n else None for x, n in zip(inputs, needed, strict=True))


class MetaNetworks:
    """Networks with fake weights, and a counter `live` of the allocations of their calls.

    A call whose inputs have the shapes of an earlier call does not run again. With gradients (a second guidance branch),
    it keeps as many bytes alive as the earlier call, else none. Among neighbouring blocks with weights of equal shapes,
    only the first and the last run; the blocks between repeat the allocations of the first. FLOPs count as if every call
    and every block had run.
    """

    def __init__(self) -> None:
        self.live, self._mode = AllocationCounter(), FakeTensorMode(allow_non_fake_inputs=True)
        self._anchor = torch.zeros((), requires_grad=True)
        self._depth = 0
        # Calls that ran: output, bytes that stayed alive, FLOPs, launches.
        self._seen: dict[Any, tuple[Any, int, int, int]] = {}
        self._kept: list[Tensor] = []  # stand for the bytes that repeated calls keep alive
        self._runs: dict[Any, _Run | None] = {}  # blocks that ran; None for a block that must run each time
        self._weight = self._fresh(torch.empty(1))

    def empty(
        self,
        module: torch.nn.Module,
        entrances: Iterable[str] = ("forward",),
        *,
        run_all: bool = False,
        reads_once: bool = False,
    ) -> None:
        """Give a network on the meta device fake weights, in place.

        Args:
            entrances: names of the methods that are called from outside.
            run_all: run every block, because blocks store something for the next call.
            reads_once: whether no later call reads the cache that transformers' blocks fill.
        """
        for part in module.modules():
            for name, p in part._parameters.items():
                if p is not None:
                    part._parameters[name] = torch.nn.Parameter(self._fresh(p), requires_grad=p.requires_grad)
            for name, b in part._buffers.items():
                if b is not None and b.is_floating_point() and b.ndim > 1:
                    part._buffers[name] = self._fresh(b)
        for blocks in () if run_all else _repeated_blocks(module):
            for block in blocks[:-1]:
                block.forward = self._block(block.forward, _kind(block), reads_once=reads_once)
        for name in entrances:
            if hasattr(module, name):
                setattr(module, name, self._door(getattr(module, name)))

    def with_gradients(self, modules: Iterable[torch.nn.Module]) -> None:
        """Give trained weights gradients, as they have after the first micro-batch. The gradients are not counted."""
        for p in (p for module in modules for p in module.parameters() if p.requires_grad):
            p.grad = self._fresh(p)

    @contextmanager
    def phase(self) -> Iterator[AllocationCounter]:
        """Forget earlier calls, and count the allocations inside this context from 0; yield the counter."""
        self._seen, self._kept, self._runs = {}, [], {}
        gc.collect()
        self.live.restart()
        yield self.live
        self._seen, self._kept, self._runs = {}, [], {}

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Count allocations inside this context."""
        self._depth += 1
        try:
            with self.live if self._depth == 1 else nullcontext():
                yield
        finally:
            self._depth -= 1

    def _fresh(self, like: Tensor) -> Tensor:
        empty = FakeTensor(self._mode, torch.empty(like.shape, dtype=like.dtype, device="meta"), torch.device("cpu"))
        self.live.ignore(empty)
        return empty

    def _door(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._depth:  # called by another method, or by a recomputed block
                return method(*args, **kwargs)
            shapes: list[Any] = []
            map_tensors(lambda x: shapes.append((x.shape, x.dtype)), (args, kwargs))
            key = (id(method), torch.is_grad_enabled(), tuple(shapes))
            if key in self._seen:
                return self._repeat_call(*self._seen[key])
            _, before, operations, launches = (
                self._counts
            )  # without fixed bytes: a repeated call shares copies of weights
            with self.inside():
                out = method(*map_tensors(self._fake, args), **map_tensors(self._fake, kwargs))
            self._seen[key] = (
                map_tensors(lambda x: torch.zeros((), dtype=x.dtype).expand(x.shape), out),
                self.live.parts[1] - before,
                self.live.operations - operations,
                self.live.launches - launches,
            )
            return self._real(out)

        return run

    def _block(self, method: Callable[..., Any], kind: Any, *, reads_once: bool) -> Callable[..., Any]:
        """Wrap a block's forward so that it does not run if an equal block ran before.

        The block that ran itself runs again when checkpointing recomputes it.
        """

        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            given = tree_leaves((args, kwargs))
            caches = [x for x in given if reads_once and isinstance(x, transformers.Cache)]
            outlines = tuple((type(x),) if x in caches else _outline(x) for x in given)
            key = (kind, torch.is_grad_enabled(), tuple(kwargs), outlines)
            known = None not in outlines and any(isinstance(x, FakeTensor) for x in given)
            earlier = self._runs.get(key) if known else None
            if earlier is not None and earlier.by is not method:
                return self._repeat_block(earlier, [x for x in given if isinstance(x, Tensor)], caches)
            before = self._counts
            out = method(*args, **kwargs)
            if known and key not in self._runs:
                effect = self._effect_of(out, [x for x in given if isinstance(x, Tensor)], before, method)
                # If bytes stay alive without gradients, the block stored them for the next call.
                keeps = effect is not None and effect.each > 0 and not torch.is_grad_enabled()
                self._runs[key] = None if keeps and not caches else effect
            return out

        return run

    @property
    def _counts(self) -> tuple[int, int, int, int]:
        return *self.live.parts, self.live.operations, self.live.launches

    def _effect_of(self, out: Any, inputs: list[Tensor], before: tuple[int, ...], by: Any) -> _Run | None:
        """Return the effect of a block's run; None if an equal block could have another effect."""
        leaves, form = tree_flatten(out)
        if not all(isinstance(x, (FakeTensor, type(None))) for x in leaves):
            return None
        outputs: list[Any] = []
        fixed, each, operations, launches = (now - then for now, then in zip(self._counts, before, strict=True))
        for x in leaves:
            same = [i for i, given in enumerate(inputs) if given is x]
            if same or x is None:
                outputs.append(same[0] if same else None)
            else:
                outputs.append((x.shape, x.dtype, x.requires_grad))
                each -= x.numel() * x.element_size()
        if fixed < 0 or each < 0:
            return None
        stayed = {"fixed": fixed, "each": each}
        return _Run(by=by, operations=operations, launches=launches, outputs=outputs, form=form, **stayed)

    def _repeat_block(self, run: _Run, inputs: list[Tensor], caches: list[transformers.Cache]) -> Any:
        self.live.operations += run.operations
        launched = self.live.launches + run.launches
        fixed = self._weight.new_empty(run.fixed, dtype=torch.uint8)
        kept = [fixed, next(x for x in inputs if isinstance(x, FakeTensor)).new_empty(run.each, dtype=torch.uint8)]
        for cache in caches:  # keep the bytes alive as long as the cache, like its keys and values
            vars(cache).setdefault("kept_bytes", []).extend(kept)
        outlines = [x for x in run.outputs if isinstance(x, tuple)]
        fakes = iter(_RepeatedBlock.apply(outlines, kept, *inputs) if outlines else ())
        self.live.launches = launched  # without the launches of the replacement
        outputs = [next(fakes) if isinstance(x, tuple) else None if x is None else inputs[x] for x in run.outputs]
        return tree_unflatten(outputs, run.form)

    def _repeat_call(self, out: Any, stayed: int, operations: int, launches: int) -> Any:
        self.live.operations += operations
        self.live.launches += launches
        if torch.is_grad_enabled():
            with self.inside(), self._mode:
                self._kept.append(torch.empty(stayed, dtype=torch.uint8))
        return map_tensors(Tensor.clone, out)

    def _real(self, out: Any) -> Any:
        fakes: list[Tensor] = []
        map_tensors(fakes.append, out)
        learns = torch.is_grad_enabled() and any(x.requires_grad for x in fakes)
        real = iter(_Bridge.apply(self._anchor, self, fakes) if learns else map(_zeros, fakes))
        return map_tensors(lambda _: next(real), out)

    def _fake(self, x: Tensor) -> Tensor:
        """Make a float tensor of three or more dimensions fake; return any other, such as a float mask, unchanged."""
        if isinstance(x, FakeTensor) or not x.is_floating_point() or x.ndim < 3:
            return x
        return self._mode.from_tensor(x.detach())


@contextmanager
def few_objects() -> Iterator[None]:
    """Freeze existing Python objects (`gc.freeze`) in this context, so that `MetaNetworks.phase` collects garbage fast."""
    frozen_before = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen_before:
            gc.unfreeze()


class _SmallTables(TorchDispatchMode):
    """A context in which results of more than `TABLE` elements go to the meta device, since they cost seconds and GiB."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if sum(x.numel() for x in given) < BROADCAST or any(x.is_meta for x in given):
            return function(*args, **kwargs)
        sketch = tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
        try:
            result = function(*sketch[0], **sketch[1])
        except (RuntimeError, NotImplementedError):  # the size of the result depends on values
            return function(*args, **kwargs)
        large = any(isinstance(x, Tensor) and x.numel() > TABLE for x in tree_leaves(result))
        return result if large else function(*args, **kwargs)


def build_on_meta(make: Callable[[], torch.nn.Module], dtype: torch.dtype) -> torch.nn.Module:
    """Build a network of `dtype` with its parameters on the meta device.

    As with `from_pretrained`, some modules stay in float32. Buffers have their values, except tables of more than
    `TABLE` elements from which nothing else is computed.
    """
    try:
        with accelerate.init_empty_weights(), _SmallTables():
            network = make()
    except (RuntimeError, TypeError, NotImplementedError):  # the network computes with a large table
        with accelerate.init_empty_weights():
            network = make()
    tie_weights = getattr(network, "tie_weights", None)
    if tie_weights is not None:
        tie_weights()
    whole = () if tie_weights is not None else getattr(network, "_keep_in_fp32_modules", None) or ()
    for name, p in network.named_parameters():
        p.data = p.data.to(torch.float32 if any(part in name.split(".") for part in whole) else dtype)
    for part in network.modules():
        for name, b in part._buffers.items():
            if name not in part._non_persistent_buffers_set and b is not None and b.is_floating_point():
                part._buffers[name] = b.to(dtype)
    return network.eval()


def add_adapters(modules: dict[str, torch.nn.Module], lora: Lora | None, begun: Mapping[str, Adapter] | None) -> int:
    """Add adapters to meta networks, or unfreeze them without `lora`; return the number of trained parameters.

    `begun` are the adapters of `model.lora.path` that training starts from, by network; empty for new adapters.
    """
    adapters: LoraConfig | Mapping[str, Adapter] | None = begun
    if lora is not None and not begun:
        assert lora.rank is not None  # without a path, `Lora` requires these
        assert lora.alpha is not None
        assert lora.targets is not None
        adapters = lora_config(lora.rank, lora.alpha, lora.targets, modules)
        adapters.init_lora_weights = False  # there are no values to draw
    with torch.device("meta"):
        return sum(p.numel() for p in Weights(modules, adapters).parameters)


def size(network: torch.nn.Module) -> int:
    """Return the bytes of the weights and buffers of a network."""
    tensors = [*network.parameters(), *network.buffers()]
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def _kind(block: torch.nn.Module) -> Any:
    weights = tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in block.named_parameters())
    return type(block), weights


def _repeated_blocks(module: torch.nn.Module) -> Iterator[list[torch.nn.Module]]:
    """Yield each run of three or more equal neighbours (see `_kind`) in a module list."""
    for blocks in [m for m in module.modules() if isinstance(m, torch.nn.ModuleList)]:
        for _, equal in itertools.groupby(blocks, _kind):
            neighbours = list(equal)
            if len(neighbours) > 2:
                yield neighbours


def _outline(x: Any) -> Any:
    """Return a key of what a block's work depends on in an argument; None if the work may depend on its values."""
    if isinstance(x, Tensor):
        return tuple(x.shape), x.dtype, x.requires_grad
    return (x,) if isinstance(x, PLAIN) else None


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=x.dtype)
