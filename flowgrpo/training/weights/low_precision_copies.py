"""Linear layers in low precision, which stand for a while in the place of those of a network's blocks.

They quantise weights alone and compute in their input's precision.
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
    from flowgrpo.training.weights import quantisation
else:
    quantisation = lazy("flowgrpo.training.weights.quantisation")

Precision = Literal["int8", "nf4"]
Copied = Literal["bfloat16"] | Precision  # what copies of layers may be in; drafts take the words of `Precision`
KEY = "train.draft.precision"
FINISH_KEY = "algorithm.tree.finish.dtype"


def of_drafts(config: RunConfig) -> Precision | None:
    """The precision of a run's drafts; None where there are none, or they are by the network as it is."""
    draft = config.train.draft if config.kind == "flow" else None
    return None if draft is None else draft.precision


def of_finishes(config: RunConfig) -> Copied | None:
    """The precision in which the trees of a run are finished; None where that is by the network as it is."""
    tree = getattr(config.algorithm, "tree", None) if config.kind == "flow" else None
    finish = getattr(tree, "finish", None)
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
        raise InputError(f"{key}: the network computes in {model.dtype} as it is, by model.dtype; take null or int8")


class Copies:
    """The copies that a run's drafts and finishes are made by: one, where both ask for the same.

    Args:
        networks: with their adapters on them.

    Raises:
        InputError: as of `LowPrecision`.
    """

    def __init__(self, config: RunConfig, networks: Iterable[torch.nn.Module]):
        networks, frozen = list(networks), config.model.lora is not None
        made: dict[Copied | None, LowPrecision] = {
            word: LowPrecision(networks, word, frozen=frozen, key=key) for word, key in of_copies(config).items()
        }
        self._made = list(made.values())
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
        return sum(each.to_come for each in self._made)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Make copies of layers that change once inside this context, in which they stay as they are."""
        with ExitStack() as stack:
            for each in self._made:
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
        self._copies: list[torch.nn.Linear] | None = None

    @property
    def to_come(self) -> int:
        """Bytes of the copies, unless they are there."""
        if self._copies is not None:
            return 0
        weights = (layer.weight for layer in self._layers())
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
        kept = self._layers()
        copies = self._copies or [_copy(layer, self._word) for layer in kept]
        if self._keeps:
            self._copies = copies
        try:
            self._put(copies)
            yield
        finally:
            self._put(kept)

    def _layers(self) -> list[torch.nn.Linear]:
        return [getattr(parent, name) for parent, name in self._places]

    def _put(self, layers: list[torch.nn.Linear]) -> None:
        for (parent, name), layer in zip(self._places, layers, strict=True):
            setattr(parent, name, layer)


def _places(network: torch.nn.Module, word: Copied, key: str) -> Iterator[tuple[torch.nn.Module, str]]:
    """The layers that are copied, each as the module that holds it and its name there."""
    for path, layer in quantisation.layers_in_blocks(network, key).items():
        if word != "bfloat16":
            quantisation.check_layer(path, layer, word, key)
        parent, _, name = path.rpartition(".")
        yield network.get_submodule(parent), name


def _copy(layer: torch.nn.Linear, word: Copied) -> torch.nn.Linear:
    """A layer in low precision, which shares the bias of the one that it is a copy of."""
    with torch.no_grad():
        return quantisation.HalfLinear(layer) if word == "bfloat16" else quantisation.QuantisedLinear(layer, word)


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
    return 2 * rows * columns if word == "bfloat16" else quantisation.layer_size(shape, width, word)
