"""A pretended GPU: tensors that say they lie on cuda:0 and compute on the host, where attention rounds another way.

It refuses what a GPU would refuse, tensors of two devices in one operation, and notes what makes the host wait until all
that was asked for is computed: a number that is asked for, a copy that is not told to return at once, an index by a mask.
While the host waits it prepares nothing, and then the GPU waits for the host.
"""

import traceback
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

ATEN = torch.ops.aten
GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
ASKING = {ATEN._local_scalar_dense.default, ATEN.nonzero.default, ATEN.equal.default, ATEN._unique2.default}
INDEXING = {ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default, ATEN._index_put_impl_.default}


class There(torch.Tensor):
    """A tensor on the GPU, whose numbers are in `held`. Autograd sees the device meta, as torch may look for no real GPU."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device="meta",
        )

    def __init__(self, held):
        self.held = held

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_cpu = is_meta = property(lambda self: False)

    def __tensor_flatten__(self):
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner, *_):
        return There(inner["held"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        _look(function, args, kwargs)
        leaves = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
        if kwargs.get("device") is not None:
            kwargs["device"] = HOST
        result = function(*tree_map_only(There, _held, args), **tree_map_only(There, _held, kwargs))
        if function is ATEN.copy_.default:
            return args[0]
        if leaves:
            return result
        return return_and_correct_aliasing(function, args, kwargs, tree_map_only(torch.Tensor, There, result))


def _held(tensor):
    return tensor.held


def _look(function, args, kwargs):
    """Note a wait; refuse an operation on two devices."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if function is ATEN.copy_.default or function is ATEN._to_copy.default:
        crosses = len({isinstance(x, There) for x in tensors}) == 2 or str(kwargs.get("device")) == "cpu"
        if crosses and not (kwargs.get("non_blocking") or True in args[2:]):
            _note(function)
    elif function in INDEXING:
        for index in args[1]:
            if index is not None and (not isinstance(index, There) or index.dtype is torch.bool):
                _note(function)
    elif function in ASKING:
        _note(function)
    elif any(x.dim() and not isinstance(x, There) for x in tensors):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found cpu and cuda:0 in {function}")


waits = []  # operations, each with the place in this repository's code that led to it


def _note(function):
    root = str(Path(__file__).parents[1])
    places = [f for f in traceback.extract_stack() if f.filename.startswith((f"{root}/flowgrpo", f"{root}/samplers"))]
    waits.append((str(function), f"{Path(places[-1].filename).name} {places[-1].name}" if places else ""))


class _Up(torch.autograd.Function):
    """Move to the GPU, and gradients back."""

    @staticmethod
    def forward(ctx, tensor):
        return There(tensor.detach())

    @staticmethod
    def backward(ctx, gradient):
        return gradient.held


def _is_gpu(device):
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"


class _Calls(TorchFunctionMode):
    """Take calls of torch with the GPU as an argument, before torch looks for a real one."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.tolist and isinstance(args[0], There):
            _note(function)
            return args[0].held.tolist()
        if function is torch.Tensor.to:
            return self._moved(*args, **kwargs)
        if _is_gpu(kwargs.get("device")):
            if function in (torch.tensor, torch.as_tensor):
                _note(function)
            return tree_map_only(torch.Tensor, _Up.apply, function(*args, **kwargs | {"device": HOST}))
        return function(*args, **kwargs)

    def _moved(self, tensor, *args, **kwargs):
        if args and isinstance(args[0], There):  # to the device and type of another
            args = (GPU, args[0].dtype, *args[1:])
        if not any(map(_is_gpu, (*args, kwargs.get("device")))):
            return torch.Tensor.to(tensor, *args, **kwargs)
        if isinstance(tensor, There):
            args, kwargs = tree_map(lambda x: None if _is_gpu(x) else x, (args, kwargs))
            return torch.Tensor.to(tensor, *args, **kwargs)
        args = tuple(HOST if _is_gpu(x) else x for x in args)
        if not (kwargs.get("non_blocking") or any(x is True for x in args)):
            _note(torch.Tensor.to)
        kwargs |= {"device": HOST} if "device" in kwargs else {}
        return _Up.apply(torch.Tensor.to(tensor, *args, **kwargs))


class _Made(TorchDispatchMode):
    """Put there what torch makes by itself beside such a tensor."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        device, alone = kwargs.get("device"), not any(isinstance(x, torch.Tensor) for x in tree_leaves(args))
        if alone and device is not None and torch.device(device).type == "meta":
            return tree_map_only(torch.Tensor, There, function(*args, **kwargs | {"device": HOST}))
        return function(*args, **kwargs)


@contextmanager
def pretended():
    """Pretend in this context that the GPU is there, and yield the list of waits."""
    waits.clear()
    with pytest.MonkeyPatch.context() as patch, _Calls(), _Made():
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        generators = (torch.Generator(),)
        patch.setattr(torch.cuda, "default_generators", generators)
        patch.setattr(torch.cuda, "get_rng_state", lambda device: generators[device].get_state())
        patch.setattr(torch.cuda, "set_rng_state", lambda state, device: generators[device].set_state(state))
        yield waits


def moved(module):
    """Move a module's parameters and buffers there."""
    for own in module.modules():
        for name, p in own._parameters.items():
            if p is not None:
                own._parameters[name] = torch.nn.Parameter(There(p.detach()), requires_grad=p.requires_grad)
        for name, buffer in own._buffers.items():
            if buffer is not None:
                own._buffers[name] = There(buffer)
    return module


def numbers(tree):
    """Return the tensors of a tree on the host."""
    return tree_map(lambda x: x.held if isinstance(x, There) else x, tree)
