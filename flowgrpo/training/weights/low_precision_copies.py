"""Temporary low-precision copies of linear layers in a network's blocks, for `train.draft` and `algorithm.tree.finish`.

`bfloat16`, `int8` and `fp8` multiply in that precision, which most devices do faster. `nf4` quantises only the weights;
products are in the input's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from flowgrpo.errors import InputError
from flowgrpo.schema.imports.heavy import torch
from flowgrpo.schema.imports.lazy import lazy

if TYPE_CHECKING:
    from flowgrpo.schema.sections import RunConfig
    from flowgrpo.training.model_files.hub_files import Shape
    from flowgrpo.training.weights import low_precision_layers, quantisation
else:
    low_precision_layers = lazy("flowgrpo.training.weights.low_precision_layers")
    quantisation = lazy("flowgrpo.training.weights.quantisation")

Precision = Literal["int8", "fp8", "nf4"]
Copied = Literal["bfloat16"] | Precision  # for finishes; drafts allow `Precision` only
EIGHT_BITS = ("int8", "fp8")
KEY = "train.draft.precision"
FINISH_KEY = "algorithm.tree.finish.dtype"


def of_drafts(config: RunConfig) -> Precision | None:
    """Return the precision of the network copy that computes drafts (`train.draft`); None if there is no such copy."""
    draft = config.train.draft if config.kind == "flow" else None
    return None if draft is None else draft.precision


def of_finishes(config: RunConfig) -> Copied | None:
    """Return the precision of the copy that computes finishes (`algorithm.tree.finish`); None if there is no such copy."""
    finish = getattr(getattr(config.algorithm, "tree", None), "finish", None) if config.kind == "flow" else None
    return None if finish is None else finish.dtype


def of_copies(config: RunConfig) -> dict[Copied, str]:
    """Return the low-precision copies that a run needs: by precision, the config key that asks for the copy."""
    asked = ((of_finishes(config), FINISH_KEY), (of_drafts(config), KEY))
    return {word: key for word, key in asked if word is not None}


def check(word: Copied, model: Any, key: str = KEY) -> None:
    """Raise InputError if the config section `model` rules out a copy of precision `word`, which `key` asks for."""
    what = "drafts are sampled" if key == KEY else "trees are finished"
    if model.quantise is not None:
        raise InputError(
            f"{key}: the base is quantised already, by model.quantise={model.quantise}, and {what} with it; set "
            "one of the two to null"
        )
    if word == "bfloat16" and model.dtype != "float32":
        raise InputError(f"{key}: the network computes in {model.dtype} as it is, by model.dtype; take null or int8")


def check_device(config: RunConfig, device: torch.device) -> None:
    """Raise InputError if a device cannot multiply in the precision of a copy that a run needs."""
    for word, key in of_copies(config).items():
        if word in EIGHT_BITS:
            low_precision_layers.try_product(word, key, device)


class Copies:
    """The copies for a run's drafts and finishes, shared if their precisions are equal. Raises as `LowPrecision`."""

    def __init__(self, config: RunConfig, networks: Iterable[torch.nn.Module]):
        networks, frozen = list(networks), config.model.lora is not None
        self._copies: dict[Copied | None, LowPrecision] = {
            word: LowPrecision(networks, word, frozen=frozen, key=key) for word, key in of_copies(config).items()
        }
        self._of_drafts, self._of_finishes = self._copies.get(of_drafts(config)), self._copies.get(of_finishes(config))

    def drafting(self) -> AbstractContextManager[None]:
        """Return a context in which networks compute with the copy for drafts, if there is one."""
        return nullcontext() if self._of_drafts is None else self._of_drafts.computing()

    def finishing(self) -> AbstractContextManager[None]:
        """Return a context in which networks compute with the copy for finishes, if there is one."""
        return nullcontext() if self._of_finishes is None else self._of_finishes.computing()

    @property
    def to_come(self) -> int:
        """Bytes of the copies that do not exist yet."""
        return sum(each.to_come for each in self._copies.values())

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Return a context that makes each copy only once. The copied layers must not change inside it."""
        with ExitStack() as stack:
            for each in self._copies.values():
                stack.enter_context(each.keep())
            yield


class LowPrecision:
    """Low-precision copies of the linear layers in networks' blocks. Adapters on the layers stay active, uncopied.

    `frozen` layers never change, so they are copied only once. Layers whose sizes int8 and fp8 cannot multiply stay as they
    are. Raises InputError, with the config key `key`, if a network has no layers that can be copied, or one whose weights
    cannot.
    """

    def __init__(self, networks: Iterable[torch.nn.Module], word: Copied, *, frozen: bool, key: str = KEY):
        self._word, self._frozen, self._keeps = word, frozen, frozen
        self._places = [place for network in networks for place in _places(network, word, key)]
        self._copies: list[torch.nn.Linear] | None = None

    @property
    def to_come(self) -> int:
        """Bytes of the copies if they do not exist yet, else 0."""
        if self._copies is not None:
            return 0
        weights = (layer.weight for layer in self._layers())
        return sum(_layer_size(tuple(weight.shape), weight.element_size(), self._word) for weight in weights)

    @contextmanager
    def keep(self) -> Iterator[None]:
        """Return a context that makes the copies only once; at its exit they are dropped unless layers are frozen."""
        self._keeps = True
        try:
            yield
        finally:
            self._keeps = self._frozen
            self._copies = self._copies if self._frozen else None

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Return a context in which the networks compute with the copies, without gradient."""
        originals = self._layers()
        copies = self._copies or [_copy(layer, self._word) for layer in originals]
        if self._keeps:
            self._copies = copies
        try:
            self._put(copies)
            yield
        finally:
            self._put(originals)

    def _layers(self) -> list[torch.nn.Linear]:
        return [getattr(parent, name) for parent, name in self._places]

    def _put(self, layers: list[torch.nn.Linear]) -> None:
        for (parent, name), layer in zip(self._places, layers, strict=True):
            setattr(parent, name, layer)


def _places(network: torch.nn.Module, word: Copied, key: str) -> list[tuple[torch.nn.Module, str]]:
    places = []
    for path, layer in quantisation.layers_in_blocks(network, key).items():
        if word == "nf4":
            quantisation.check_layer(path, layer, word, key)
        if word in EIGHT_BITS:
            if not low_precision_layers.fits((layer.out_features, layer.in_features)):
                continue
            quantisation.check_finite(path, layer, key)
        parent, _, name = path.rpartition(".")
        places.append((network.get_submodule(parent), name))
    if not places:
        raise InputError(
            f"{key}: {word} takes layers with inputs and outputs in multiples of {low_precision_layers.MULTIPLE}, and "
            f"{type(network).__name__} has none in its blocks; set it to null"
        )
    return places


def _copy(layer: torch.nn.Linear, word: Copied) -> torch.nn.Linear:
    with torch.no_grad():
        if word == "bfloat16":
            return low_precision_layers.HalfLinear(layer)
        if word in EIGHT_BITS:
            return low_precision_layers.EightBitLinear(layer, word)
        return quantisation.QuantisedLinear(layer, word)


def size(tensors: Mapping[str, Shape], width: int, word: Copied | None) -> int:
    """Return the bytes of the copies of a network's layers, whose weights have `width` bytes; 0 if `word` is None."""
    return 0 if word is None else sum(_layer_size(shape, width, word) for shape in quantisation.in_blocks(tensors))


def _layer_size(shape: Shape, width: int, word: Copied) -> int:
    rows, columns = shape
    if word in EIGHT_BITS:
        return low_precision_layers.size(shape) if low_precision_layers.fits(shape) else 0
    return 2 * rows * columns if word == "bfloat16" else quantisation.layer_size(shape, width, word)
