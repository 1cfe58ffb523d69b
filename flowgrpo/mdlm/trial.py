"""What a run of a language model allocates on its device, found with a model of real size that holds no numbers.

Only its config is read; see `flowgrpo.training.hollow`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import transformers

from flowgrpo.mdlm import architectures, start
from flowgrpo.mdlm.checkpointing import checkpoint_gradients
from flowgrpo.mdlm.config import TextConfig
from flowgrpo.mdlm.decoding.predictor import MaskPredictor
from flowgrpo.mdlm.decoding.probe import Form
from flowgrpo.mdlm.loading import config_of, model_paths
from flowgrpo.mdlm.methods.answers import Answers
from flowgrpo.mdlm.methods.estimate import Call, log_probs
from flowgrpo.mdlm.methods.views import Views
from flowgrpo.training import quantise
from flowgrpo.training.hollow import Hollow, built, size
from flowgrpo.training.hub import Shape
from flowgrpo.training.weights import Weights, lora_config
from rewards.compute import DTYPES


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Sizes of a model, and what its calls allocate for one row beside it, in bytes.

    Attributes:
        weights: of the model as it is loaded.
        shapes: of its tensors by name.
        width: bytes of a weight that is not quantised.
        trained: how many numbers are trained.
        decode: a call of the decoder.
        update: a view with gradients, and its backward pass; not measured, 0, where the config has checkpointing.
        update_checkpointed: the same with `model.gradient_checkpointing`.
    """

    weights: int
    shapes: dict[str, Shape]
    width: int
    trained: int
    decode: int
    update: int
    update_checkpointed: int


class _Unasked(MaskPredictor):
    """A predictor whose model cannot be tried out: rows without padding, its head asked for what is scored."""

    def __init__(self, model: transformers.PreTrainedModel, block_size: int | None):
        self.model, self.block_size, self.shift = model, block_size, False
        self.mask_id, self.pad_id, self.evaluations, self.selects = 0, None, 0, self.head() is not None
        self._takes_all, self._takes = True, set()
        self.form = self.padded_form = Form("none" if block_size is None else "4d")


def trial(config: TextConfig, prompt: int, block_size: int | None) -> Trial:
    """Measure a run's calls.

    Args:
        prompt: tokens of the longest prompt.
        block_size: of block-causal attention.

    Raises:
        InputError: there is no such model, or it has not what the config asks for.
    """
    model, hollow = config.model, Hollow()
    place, _ = model_paths(model.path)
    network = built(lambda: _made(model.path, place), DTYPES[model.dtype]).requires_grad_(False)
    network.config._experts_implementation = "grouped_mm"  # a loop over experts asks which of them were chosen
    weights, shapes = size(network), {name: tuple(p.shape) for name, p in network.named_parameters()}
    if model.quantise in quantise.FORMS:
        quantise.quantise(network, model.quantise)
    lora = start.adapters(model, start.read(model), network) or (
        model.lora and lora_config(model.lora.rank, model.lora.alpha, model.lora.targets, {"model": network})
    )
    with torch.device("meta"):
        trained = sum(p.numel() for p in Weights({"model": network}, lora).parameters)
    hollow.empty(network, ())
    predictor = _Unasked(network, block_size)
    length = model.length
    ids = torch.ones(1, prompt + length, dtype=torch.long)
    with hollow.phase() as live, hollow.inside(), torch.no_grad():
        logits = predictor.logits(ids, start=prompt)
        logits.log_softmax(-1).exp().argmax(-1)  # as scorers and proposals do
        decode = live.peak
        del logits
    hollow.with_gradients([network])
    whole = 0 if model.gradient_checkpointing else _learnt(hollow, predictor, ids, prompt)
    checkpoint_gradients(network)
    return Trial(
        weights=weights,
        shapes=shapes,
        width=torch.finfo(DTYPES[model.dtype]).bits // 8,
        trained=trained,
        decode=decode,
        update=whole,
        update_checkpointed=_learnt(hollow, predictor, ids, prompt),
    )


def _made(path: str, place: str) -> transformers.PreTrainedModel:
    written = config_of(place)
    known = architectures.architecture(written)
    if known is not None:
        return known.model(architectures.translated(path, written))
    config = transformers.AutoConfig.from_pretrained(place)
    kind = transformers.AutoModelForMaskedLM
    if config.model_type not in transformers.models.auto.modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        kind = transformers.AutoModelForCausalLM
    return kind.from_config(config)


def _learnt(hollow: Hollow, predictor: MaskPredictor, ids: torch.Tensor, prompt: int) -> int:
    """The most bytes in a forward and a backward pass of one view that scores a whole answer."""
    scored = torch.ones(1, ids.shape[1] - prompt, dtype=torch.bool)
    hidden = torch.nn.functional.pad(scored, (prompt, 0))
    answers = Answers(
        ids=ids,
        attention_mask=torch.ones_like(hidden),
        scored=scored,
        addresses=[()],
        block_size=predictor.block_size,
    )
    views = Views(hidden[None], scored[None].float(), torch.ones(1))
    with hollow.phase() as live, hollow.inside():
        log_probs(predictor, answers, views, Call(torch.tensor([0]), torch.tensor([0]))).sum().backward()
        return live.peak
