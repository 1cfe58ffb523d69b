"""A frozen base that torchao or bitsandbytes quantises while its files are loaded, by diffusers' and transformers' configs.

These take every linear layer (of a language model all but its head), in dtypes and with kernels of their own. Each keeps its
input's precision: forms that also quantise activations as they come are not here, see `quantise.refuse_dynamic`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.schema.lazy import lazy
from flowgrpo.training.model_files.hub_files import Shape
from flowgrpo.training.weights.optimizers import EXTRA
from flowgrpo.training.weights.trained_weights import EMBEDDINGS

if TYPE_CHECKING:
    import diffusers
    import transformers
    from torchao import quantization
else:
    diffusers = lazy("diffusers")
    transformers = lazy("transformers")
    quantization = lazy("torchao.quantization")


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a library keeps the weights of a layer.

    Attributes:
        library: that quantises.
        bits: of a weight.
        shared: how many neighbours share a scale; None for a whole row.
        beside: bytes of a scale, with its zero point.
        like: the word of this package's own that is nearest.
    """

    library: str
    bits: int
    shared: int | None
    beside: int
    like: str


LIBRARY_FORMS = {
    "torchao_int8": Form(library="torchao", bits=8, shared=None, beside=5, like="int8"),
    "torchao_fp8": Form(library="torchao", bits=8, shared=None, beside=4, like="fp8"),
    "bnb_nf4": Form(library="bitsandbytes", bits=4, shared=64, beside=4, like="nf4"),
}


class MatrixLinear(torch.nn.Linear):
    """A linear layer whose weight is a library's, and has a product with contiguous matrices, but not with every input."""

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product (..., out) with x (..., in)."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return torch.nn.functional.linear(rows, self.weight, self.bias).reshape(*x.shape[:-1], -1)


def check(word: str | None, *, diffuses: bool) -> None:
    """Refuse a form that cannot be made here; a word of this package's own, or None, always can.

    Args:
        diffuses: whether diffusers loads the model, which asks for a GPU before bitsandbytes quantises.

    Raises:
        InputError: its library is not installed, or there is no GPU and it needs one.
    """
    form = LIBRARY_FORMS.get(word)
    if form is None:
        return
    if find_spec(form.library) is None:
        raise InputError(f"model.quantise: {word} needs the package {form.library}, {EXTRA}, or take {form.like}")
    if diffuses and form.library == "bitsandbytes" and not torch.accelerator.is_available():
        raise InputError(
            f"model.quantise: diffusers lets bitsandbytes quantise on a GPU only, take {form.like} for {word}"
        )


def pipeline_options(word: str | None, networks: Mapping[str, str], dtype: torch.dtype) -> dict[str, Any]:
    """Further arguments for a pipeline's `from_pretrained`; none for a word that is not a library's.

    Args:
        networks: names of the components that are quantised, and the library that each is of: diffusers or transformers.

    Raises:
        InputError: as `check`.
    """
    configs = {name: library_config(word, library, dtype) for name, library in networks.items()}
    if not any(configs.values()):
        return {}
    return {"quantization_config": diffusers.PipelineQuantizationConfig(quant_mapping=configs)}


def model_options(word: str | None, dtype: torch.dtype) -> dict[str, Any]:
    """The same for the `from_pretrained` of a language model.

    Raises:
        InputError: as `check`.
    """
    config = library_config(word, "transformers", dtype)
    return {} if config is None else {"quantization_config": config}


def library_config(word: str | None, library: str, dtype: torch.dtype) -> Any:
    """What the `from_pretrained` of one network takes as its `quantization_config`; None for a word of this package's own.

    Args:
        library: of the network, diffusers or transformers; each has classes of its own.
        dtype: of the weights that are not quantised, in which the layers compute.

    Raises:
        InputError: as `check`.
    """
    check(word, diffuses=library != "transformers")
    home = transformers if library == "transformers" else diffusers
    match word:
        case "torchao_int8":
            return home.TorchAoConfig(quantization.Int8WeightOnlyConfig())
        case "torchao_fp8":
            return home.TorchAoConfig(quantization.Float8WeightOnlyConfig())
        case "bnb_nf4":
            return home.BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_compute_dtype=dtype,
                bnb_4bit_use_double_quant=False,
            )
    return None


def refuse_quantised(network: torch.nn.Module, word: str | None) -> None:
    """Refuse a loaded network whose own files were quantised, so that the library did not do what was asked for.

    Raises:
        InputError: they were.
    """
    quantizer = getattr(network, "hf_quantizer", None)
    if word in LIBRARY_FORMS and (quantizer is None or quantizer.pre_quantized):
        raise InputError("model.quantise: the model's weights are quantised already in its files, set it to null")


def size(tensors: Mapping[str, Shape], width: int, word: str) -> int:
    """Bytes of a frozen network.

    Args:
        tensors: shapes of the network's, by name.
        width: bytes of a weight that is not quantised.
        word: of `LIBRARY_FORMS`.
    """
    form, layers = LIBRARY_FORMS[word], _layers(tensors)
    total = sum(math.prod(shape) for shape in tensors.values()) * width
    for shape in layers:
        count = math.prod(shape)
        scales = shape[0] if form.shared is None else math.ceil(count / form.shared)
        total += count * form.bits // 8 + scales * form.beside - count * width
    return total


def kept(tensors: Mapping[str, Shape], width: int, word: str | None) -> int:
    """Bytes of the weights that a graph keeps until its backward pass, without checkpointing; arguments as of `size`."""
    form = LIBRARY_FORMS.get(word)
    if form is None or form.library != "torchao":
        return 0
    return sum(math.prod(shape) for shape in _layers(tensors)) * width


def _layers(tensors: Mapping[str, Shape]) -> list[Shape]:
    """Shapes of the linear layers; a language model's head, which has the shape of its embedding, is none."""
    whole = {shape for name, shape in tensors.items() if name.endswith(EMBEDDINGS)}
    return [s for name, s in tensors.items() if len(s) == 2 and name.endswith(".weight") and s not in whole]
