"""Linear layers in low precision, which stand for a while in the place of those of a network's blocks.

The words int8, fp8 and nf4 are layers of this package, which quantise weights alone and compute in their input's precision.
Those of torchao do so, too (torchao_nvfp4), or quantise activations as they come and multiply in low precision (dynamic): no
gradient passes there, so they are for sampling only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from flowgrpo.errors import InputError
from flowgrpo.schema.heavy import torch
from flowgrpo.schema.lazy import lazy

if TYPE_CHECKING:
    from torchao import quantization
    from torchao.prototype import mx_formats

    from flowgrpo.schema.sections import RunConfig
    from flowgrpo.training.model_files.hub_files import Shape
    from flowgrpo.training.weights import library_quantisation, optimizers, quantisation
else:
    quantization = lazy("torchao.quantization")
    mx_formats = lazy("torchao.prototype.mx_formats")
    optimizers = lazy("flowgrpo.training.weights.optimizers")
    quantisation = lazy("flowgrpo.training.weights.quantisation")
    library_quantisation = lazy("flowgrpo.training.weights.library_quantisation")

Precision = Literal[
    "int8", "fp8", "nf4", "torchao_nvfp4", "torchao_int8_dynamic", "torchao_fp8_dynamic", "torchao_nvfp4_dynamic"
]
Copied = Literal["bfloat16"] | Precision  # what copies of layers may be in; drafts take the words of `Precision`
KEY = "train.draft.precision"
FINISH_KEY = "algorithm.tree.finish.dtype"
OWN = ("int8", "fp8", "nf4")
MADE_ANEW = (*OWN, "torchao_nvfp4")  # whose weights are made in each call
SIXTEENTHS = ("torchao_nvfp4", "torchao_fp8_dynamic", "torchao_nvfp4_dynamic")  # that take multiples of 16 only
# Types of the weights that a word takes. For fp8 torchao has a scale for each row of activations in bfloat16 alone, and one
# for all rows would make a sample depend on its neighbours in a batch.
DTYPES = {
    "torchao_nvfp4": ("bfloat16", "float32"),
    "torchao_fp8_dynamic": ("bfloat16",),
    "torchao_nvfp4_dynamic": ("bfloat16",),
}
CAPABILITY = {"torchao_fp8_dynamic": (8, 9), "torchao_nvfp4_dynamic": (10, 0)}  # of the GPU, at the least


def of_drafts(config: RunConfig) -> Precision | None:
    """The precision of a run's drafts; None where there are none, or they are by the network as it is."""
    draft = config.train.draft if config.kind == "flow" else None
    return None if draft is None else draft.precision


def of_finishes(config: RunConfig) -> Copied | None:
    """The precision in which the trees of a run are finished; None where that is by the network as it is."""
    finish = getattr(config.algorithm.tree, "finish", None) if config.kind == "flow" else None
    return None if finish is None else finish.dtype


def of_copies(config: RunConfig) -> dict[Copied, str]:
    """The precisions of which a run has a copy of its layers, each once, and the key that asks for it."""
    asked = ((of_drafts(config), KEY), (of_finishes(config), FINISH_KEY))
    return {word: key for word, key in reversed(asked) if word is not None}


def check(word: Copied, model: Any, key: str = KEY) -> None:
    """Refuse a precision that does not go with a flow model's section `model`.

    Args:
        key: that asks for it.

    Raises:
        InputError: names the key and what it can be.
    """
    what = "drafts are sampled" if key == KEY else "trees are finished"
    if model.quantise is not None:
        raise InputError(
            f"{key}: the base is quantised already, by model.quantise={model.quantise}, and {what} with it; set "
            "one of the two to null"
        )
    if word == "bfloat16" and model.dtype != "float32":
        raise InputError(
            f"{key}: the network computes in {model.dtype} as it is, by model.dtype; take null, int8 or fp8"
        )
    if word in (*OWN, "bfloat16"):
        return
    takes = DTYPES.get(word, (model.dtype,))
    if model.lora is None and (model.dtype != "float32" or "float32" not in takes):
        raise InputError(
            f"{key}: {word} computes in the type of the weights, and those that model.lora=null trains are float32; take "
            f"{', '.join(OWN)}"
        )
    if model.dtype not in takes:
        raise InputError(
            f"{key}: {word} takes weights in {' or '.join(takes)}, set model.dtype={takes[0]}, or take {', '.join(OWN)}"
        )


def check_installed(word: Copied | None, key: str = KEY) -> None:
    """Refuse a precision that this machine has no library or no GPU for.

    Args:
        key: that asks for it.

    Raises:
        InputError: says which it needs.
    """
    if word is None or word in (*OWN, "bfloat16"):
        return
    if find_spec("torchao") is None:
        raise InputError(
            f"{key}: {word} needs the package torchao, {optimizers.EXTRA}, or take {' or '.join(OWN)}, which need none"
        )
    least = CAPABILITY.get(word)
    if least is not None and not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= least):
        raise InputError(
            f"{key}: {word} multiplies on GPUs of compute capability {least[0]}.{least[1]} or later, of which there is none "
            "here; take torchao_int8_dynamic, or one that keeps weights alone: torchao_nvfp4, fp8"
        )


class Copies:
    """The copies that a run's drafts and finishes are made by: one, where both ask for the same.

    Args:
        networks: with their adapters on them.

    Raises:
        InputError: as of `LowPrecision`.
    """

    def __init__(self, config: RunConfig, networks: Iterable[torch.nn.Module]):
        networks, frozen = list(networks), config.model.lora is not None
        made = {word: LowPrecision(networks, word, frozen=frozen, key=key) for word, key in of_copies(config).items()}
        self._of_drafts, self._of_finishes = made.get(of_drafts(config)), made.get(of_finishes(config))

    def drafting(self) -> AbstractContextManager[None]:
        """A context in which networks compute as drafts ask for."""
        return nullcontext() if self._of_drafts is None else self._of_drafts.computing()

    def finishing(self) -> AbstractContextManager[None]:
        """A context in which networks compute as finishes ask for."""
        return nullcontext() if self._of_finishes is None else self._of_finishes.computing()

    @property
    def to_come(self) -> int:
        """Bytes of copies that will be made."""
        return sum(each.to_come for each in {self._of_drafts, self._of_finishes} - {None})

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Make copies of layers that change once inside this context, in which they stay as they are."""
        with ExitStack() as stack:
            for each in {self._of_drafts, self._of_finishes} - {None}:
                stack.enter_context(each.kept())
            yield


class LowPrecision:
    """Copies of the linear layers in networks' blocks, in low precision.

    Adapters on the layers are no part of them, and act with the values that they have when something is computed.

    Args:
        networks: with their adapters on them.
        word: of `Precision`.
        frozen: whether the layers never change: they are copied once then, else each time anew.
        key: of the config, that asks for them.

    Raises:
        InputError: a network has no such layers, or one that cannot be copied.
    """

    def __init__(self, networks: Iterable[torch.nn.Module], word: Copied, *, frozen: bool, key: str = KEY):
        self._word, self._frozen, self._keeps = word, frozen, frozen
        self._places = [place for network in networks for place in _places(network, word, key)]
        self._copies: list[torch.nn.Module] | None = None

    @property
    def to_come(self) -> int:
        """Bytes of the copies, unless they are there."""
        if self._copies is not None:
            return 0
        weights = (parent.get_submodule(name).weight for parent, name in self._places)
        return sum(_layer_size(tuple(weight.shape), weight.element_size(), self._word) for weight in weights)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Make copies once inside this context; those of layers that change are dropped behind it."""
        self._keeps = True
        try:
            yield
        finally:
            self._keeps = self._frozen
            self._copies = self._copies if self._frozen else None

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Compute with the copies inside this context, without gradient."""
        copies = self._copies or [_copy(parent.get_submodule(name), self._word) for parent, name in self._places]
        if self._keeps:
            self._copies = copies
        kept = [parent.get_submodule(name) for parent, name in self._places]
        try:
            self._put(copies)
            yield
        finally:
            self._put(kept)

    def _put(self, layers: list[torch.nn.Module]) -> None:
        for (parent, name), layer in zip(self._places, layers, strict=True):
            setattr(parent, name, layer)


def _places(network: torch.nn.Module, word: Copied, key: str) -> Iterator[tuple[torch.nn.Module, str]]:
    """The layers that are copied, each as the module that holds it and its name there."""
    for path, layer in quantisation.layers_in_blocks(network, key).items():
        if word in OWN:
            quantisation.check_layer(path, layer, word, key)
        elif word in SIXTEENTHS and (layer.in_features % 16 or layer.out_features % 16):
            raise InputError(
                f"{key}: {word} takes multiples of 16 weights, {path} has {layer.out_features} x {layer.in_features}; take "
                "int8"
            )
        parent, _, name = path.rpartition(".")
        yield network.get_submodule(parent), name


def _copy(layer: torch.nn.Linear, word: Copied) -> torch.nn.Module:
    """A layer in low precision, which shares the bias of the one that it is a copy of."""
    with torch.no_grad():
        if word == "bfloat16":
            return quantisation.HalfLinear(layer)
        if word in OWN:
            return quantisation.QuantisedLinear(layer, word)
        copy = library_quantisation.MatrixLinear(layer.in_features, layer.out_features, bias=False, device="meta")
        copy.weight, copy.bias = torch.nn.Parameter(layer.weight.detach(), requires_grad=False), layer.bias
        holder = torch.nn.Sequential(copy)
        quantization.quantize_(holder, _config(word))
        return holder[0]


def _config(word: Precision) -> Any:
    """What torchao makes of a word."""
    match word:
        case "torchao_int8_dynamic":
            return quantization.Int8DynamicActivationInt8WeightConfig()
        case "torchao_fp8_dynamic":
            return quantization.Float8DynamicActivationFloat8WeightConfig(
                granularity=quantization.PerRow(), set_inductor_config=False
            )
        case "torchao_nvfp4":
            return mx_formats.NVFP4WeightOnlyConfig()
        case _:
            return mx_formats.NVFP4DynamicActivationNVFP4WeightConfig(use_triton_kernel=False)


def size(tensors: Mapping[str, Shape], width: int, word: Copied | None) -> int:
    """Bytes of the copies of a network's layers.

    Args:
        tensors: shapes of the network's, by name.
        width: bytes of one of its weights.
        word: None for no copies.
    """
    return 0 if word is None else sum(_layer_size(shape, width, word) for shape in quantisation.in_blocks(tensors))


def _layer_size(shape: Shape, width: int, word: Copied) -> int:
    rows, columns = shape
    match word:
        case "bfloat16":
            return 2 * rows * columns
        case "torchao_int8_dynamic":
            return rows * columns + 5 * rows  # a scale and a zero point
        case "torchao_fp8_dynamic":
            return rows * columns + 4 * rows
        case "torchao_nvfp4" | "torchao_nvfp4_dynamic":  # scales of 16 in tiles of 128 x 4, and one of them all
            return rows * columns // 2 + 512 * math.ceil(rows / 128) * math.ceil(columns / 64) + 4
    return quantisation.layer_size(shape, width, word)
