"""Networks of real size without numbers: what they allocate is counted, and nothing is loaded or computed.

Inside a hollow network tensors are torch's fake ones: shapes and types, without values. Around it everything is real and as
ever: what goes in is made fake, and zeros come out, tied to the fake result, so that a backward pass which reaches them
runs through the network, too. Whole numbers and vectors stay real inside, for they steer (masks, lengths, times).

The pretended device is a CPU: the attention that fake tensors take there keeps what a GPU's flash attention keeps, where a
pretended GPU would take another.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import accelerate
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from flowgrpo.data.tensor_maps import map_tensors
from flowgrpo.training.planning.allocation_counter import AllocationCounter

Tensor = torch.Tensor
TABLE = 2**24  # numbers of the largest table that a network that is built computes
BROADCAST = 2**12  # numbers from which on an operation is looked at, whether its result is such a table
PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


class _Bridge(torch.autograd.Function):
    """Real zeros in the place of fake results; their gradient starts the backward pass of the fake ones."""

    @staticmethod
    def forward(ctx, anchor: Tensor, hollow: MetaNetworks, results: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.hollow, ctx.results = hollow, results
        return tuple(_zeros(x) for x in results)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[None, ...]:
        results, ctx.results = [x for x in ctx.results if x.requires_grad], None
        with ctx.hollow.inside():
            torch.autograd.backward(results, [torch.ones_like(x) for x in results])
        return None, None, None


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What a block left behind.

    Attributes:
        by: its forward.
        fixed, each: bytes that stayed beside what it returned: once, and for the row.
        operations: floating-point ones.
        launches: functions of PyTorch that it called.
        outputs: what it returned, flat: the index of an input; shape, type and whether it carries a gradient; or a value.
        form: of what it returned.
    """

    by: Callable[..., Any]
    fixed: int
    each: int
    operations: int
    launches: int
    outputs: list[Any]
    form: TreeSpec


class _Again(torch.autograd.Function):
    """A block that has run with other weights: its outputs without numbers, and what it keeps for its backward pass."""

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
    """Makes hollow networks, and counts what they allocate.

    A call that only repeats an earlier one of the same shapes is not run again: without gradients it allocates nothing that
    stays, and with gradients (a second branch of guidance) as much stays as of the first. Of neighbouring blocks with equal
    weights the first and the last are run; one between them leaves behind what the first did. Operations of forward
    passes are counted of what is not run again, too.

    Attributes:
        live: the count.
    """

    def __init__(self) -> None:
        self.live, self._mode = AllocationCounter(), FakeTensorMode(allow_non_fake_inputs=True)
        self._anchor = torch.zeros((), requires_grad=True)
        self._depth = 0
        # What a call returned, bytes that stayed, its operations, and its launches.
        self._seen: dict[Any, tuple[Any, int, int, int]] = {}
        self._again: list[Tensor] = []
        self._runs: dict[Any, _Run | None] = {}  # of blocks; None of one that is run each time
        self._weight = self._fresh(torch.empty(1))

    def empty(
        self,
        module: torch.nn.Module,
        entrances: Iterable[str] = ("forward",),
        *,
        run_all: bool = False,
        reads_once: bool = False,
    ) -> None:
        """Give a network that was built on the device meta fake weights, which are not counted.

        Args:
            module: changed in place; its parameters are new ones.
            entrances: the methods that are called from outside.
            run_all: run every block, as blocks need which leave something for the next call.
            reads_once: whether the keys and values that transformers' blocks leave are read by no next call.
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
        """Give trained weights gradients, as they have them from the second micro-batch on; they are not counted."""
        for p in (p for module in modules for p in module.parameters() if p.requires_grad):
            p.grad = self._fresh(p)

    @contextmanager
    def phase(self) -> Iterator[AllocationCounter]:
        """Forget earlier calls; what is allocated inside this context is counted from 0."""
        self._seen, self._again, self._runs = {}, [], {}
        gc.collect()
        self.live.restart()
        yield self.live
        self._seen, self._again, self._runs = {}, [], {}

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
        empty = FakeTensor(self._mode, torch.empty(like.shape, dtype=like.dtype, device="meta"), torch.device("cpu"))
        self.live.ignore(empty)
        return empty

    def _door(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._depth:  # called by another method, or by a block that is computed again
                return method(*args, **kwargs)
            shapes: list[Any] = []
            map_tensors(lambda x: shapes.append((x.shape, x.dtype)), (args, kwargs))
            key = (id(method), torch.is_grad_enabled(), tuple(shapes))
            if key in self._seen:
                return self._repeated(*self._seen[key])
            _, before, operations, launches = self._counted  # another branch has the same copies of weights
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
        """A block's forward, which is not run where an equal one was; that one is, when it is computed again."""

        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            given = tree_leaves((args, kwargs))
            caches = [x for x in given if reads_once and isinstance(x, transformers.Cache)]
            outlines = tuple((type(x),) if x in caches else _outline(x) for x in given)
            key = (kind, torch.is_grad_enabled(), tuple(kwargs), outlines)
            known = None not in outlines and any(isinstance(x, FakeTensor) for x in given)
            found = self._runs.get(key) if known else None
            if found is not None and found.by is not method:
                return self._as_before(found, [x for x in given if isinstance(x, Tensor)], caches)
            before = self._counted
            out = method(*args, **kwargs)
            if known and key not in self._runs:
                left = self._left(out, [x for x in given if isinstance(x, Tensor)], before, method)
                # Without gradient what stays is for the next call.
                keeps = left is not None and left.each > 0 and not torch.is_grad_enabled()
                self._runs[key] = None if keeps and not caches else left
            return out

        return run

    @property
    def _counted(self) -> tuple[int, int, int, int]:
        return *self.live.parts, self.live.operations, self.live.launches

    def _left(self, out: Any, inputs: list[Tensor], before: tuple[int, ...], by: Any) -> _Run | None:
        """What a block left behind; None where it is not known what the next one would do."""
        found, form = tree_flatten(out)
        outputs: list[Any] = []
        made = 0
        for x in found:
            same = [i for i, given in enumerate(inputs) if given is x]
            if same or not isinstance(x, Tensor):
                outputs.append(same[0] if same else x)
                continue
            outputs.append((x.shape, x.dtype, x.requires_grad))
            made += x.numel() * x.element_size()
        fixed, each, operations, launches = (now - then for now, then in zip(self._counted, before, strict=True))
        plain = all(isinstance(x, (FakeTensor, type(None))) for x in found)
        if not plain or fixed < 0 or each < made:
            return None
        stayed = {"fixed": fixed, "each": each - made}
        return _Run(by=by, operations=operations, launches=launches, outputs=outputs, form=form, **stayed)

    def _as_before(self, run: _Run, inputs: list[Tensor], caches: list[transformers.Cache]) -> Any:
        self.live.operations += run.operations
        launched = self.live.launches + run.launches
        fixed = self._weight.new_empty(run.fixed, dtype=torch.uint8)
        kept = [fixed, next(x for x in inputs if isinstance(x, FakeTensor)).new_empty(run.each, dtype=torch.uint8)]
        for cache in caches:  # which lives as long as keys and values in it would
            vars(cache).setdefault("hollow", []).extend(kept)
        outlines = [x for x in run.outputs if isinstance(x, tuple)]
        made = iter(_Again.apply(outlines, kept, *inputs) if outlines else ())
        self.live.launches = launched  # and not what stands in for the block
        outputs = [next(made) if isinstance(x, tuple) else None if x is None else inputs[x] for x in run.outputs]
        return tree_unflatten(outputs, run.form)

    def _repeated(self, out: Any, stayed: int, operations: int, launches: int) -> Any:
        self.live.operations += operations
        self.live.launches += launches
        if torch.is_grad_enabled():
            with self.inside(), self._mode:
                self._again.append(torch.empty(stayed, dtype=torch.uint8))
        return map_tensors(Tensor.clone, out)

    def _real(self, out: Any) -> Any:
        """What a network returns, with real zeros in the place of its fake results."""
        found: list[Tensor] = []
        map_tensors(found.append, out)
        learns = torch.is_grad_enabled() and any(x.requires_grad for x in found)
        real = iter(_Bridge.apply(self._anchor, self, found) if learns else map(_zeros, found))
        return map_tensors(lambda _: next(real), out)

    def _fake(self, x: Tensor) -> Tensor:
        """A float tensor of three dimensions or more as a fake one; any other as it is, masks of floats among them."""
        if isinstance(x, FakeTensor) or not x.is_floating_point() or x.ndim < 3:
            return x
        return self._mode.from_tensor(x.detach())


@contextmanager
def few_objects() -> Iterator[None]:
    """Put all objects that are there aside, of which there are millions, so that `MetaNetworks.phase` collects garbage fast.

    What had been put aside before stays so.
    """
    put_aside = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not put_aside:
            gc.unfreeze()


class _SmallTables(TorchDispatchMode):
    """Leaves results of more than `TABLE` numbers on the device meta: a table of positions can take ten seconds and GiB."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if sum(x.numel() for x in given) < BROADCAST or any(x.is_meta for x in given):
            return function(*args, **kwargs)
        sketch = tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
        try:
            found = function(*sketch[0], **sketch[1])
        except (RuntimeError, NotImplementedError):  # its size depends on numbers
            return function(*args, **kwargs)
        large = any(isinstance(x, Tensor) and x.numel() > TABLE for x in tree_leaves(found))
        return found if large else function(*args, **kwargs)


def built(make: Callable[[], torch.nn.Module], dtype: torch.dtype) -> torch.nn.Module:
    """A network of `dtype` with its parameters on the device meta, as its class makes it of a config.

    What its class keeps in float32 stays so, as where `from_pretrained` loads it; what is no parameter has its values,
    unless it is a table of more than `TABLE` numbers that nothing else is made of.
    """
    try:
        with accelerate.init_empty_weights(), _SmallTables():
            network = make()
    except (RuntimeError, TypeError, NotImplementedError):  # it computes with a table that has no numbers
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


def size(network: torch.nn.Module) -> int:
    """Bytes of the weights and buffers of a network."""
    tensors = [*network.parameters(), *network.buffers()]
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def _kind(block: torch.nn.Module) -> Any:
    """Equal for blocks that do the same with other numbers."""
    weights = tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in block.named_parameters())
    return type(block), weights


def _repeated_blocks(module: torch.nn.Module) -> Iterator[list[torch.nn.Module]]:
    """Neighbours in a list that are equal, three or more."""
    for blocks in [m for m in module.modules() if isinstance(m, torch.nn.ModuleList)]:
        for _, equal in itertools.groupby(blocks, _kind):
            neighbours = list(equal)
            if len(neighbours) > 2:
                yield neighbours


def _outline(x: Any) -> Any:
    """What a block's work depends on in an argument; None where it may be more than that."""
    if isinstance(x, Tensor):
        return tuple(x.shape), x.dtype, x.requires_grad
    return (x,) if isinstance(x, PLAIN) else None


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=x.dtype)
