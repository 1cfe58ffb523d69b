"""Memory and operations of a language model's calls, measured with torch's fake tensors (see `meta_networks`)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from flowgrpo.mdlm.config import TextConfig
from flowgrpo.mdlm.decoding.decode import Decoder
from flowgrpo.mdlm.decoding.network.kv_cache import Cache, build_cache
from flowgrpo.mdlm.decoding.network.mask_probe import Form
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from flowgrpo.mdlm.methods.likelihoods.answers import Answers
from flowgrpo.mdlm.methods.likelihoods.estimate import Call, log_probs
from flowgrpo.mdlm.methods.likelihoods.masked_views import Views
from flowgrpo.mdlm.models import architectures, initial_lora
from flowgrpo.mdlm.models.gradient_checkpointing import can_checkpoint, checkpoint_gradients
from flowgrpo.mdlm.models.load import config_of, model_paths
from flowgrpo.mdlm.planning.decoder_steps import block_size, count_decoder_steps, evaluation_decoder, training_decoder
from flowgrpo.training.planning.allocation_counter import Peaks
from flowgrpo.training.planning.memory_phases import TrialSizes
from flowgrpo.training.planning.meta_networks import MetaNetworks, add_adapters, build_on_meta, size
from flowgrpo.training.weights import quantisation
from rewards.compute import DTYPES


@dataclass(frozen=True, kw_only=True)
class Trial(TrialSizes):
    """Bytes of a model's weights, and peak bytes and floating-point operations of its decoder steps and update calls."""

    decode: Peaks  # steps of the training decoder
    evaluate: Peaks | None  # steps of the evaluation decoder; None if they are like those of the training decoder
    decode_operations: int  # of a step with all guidance branches; a mean if the decoder has a cache
    evaluate_operations: int
    update_operations: int  # of the forward pass of a view
    launches: int  # PyTorch functions that the forward pass of a view calls


class _UnprobedPredictor(MaskPredictor):
    """A `MaskPredictor` that runs no probes: it assumes no padding, and a head that can compute some positions only."""

    def __init__(self, model: transformers.PreTrainedModel, block_size: int | None):
        self.model, self.block_size, self.shift = model, block_size, False
        self.mask_id, self.pad_id, self.evaluations, self.selects = 0, None, 0, self.head() is not None
        self._takes_all, self._takes = True, set()
        self.form = self.padded_form = Form("none" if block_size is None else "4d")


def trial(config: TextConfig, prompt: int) -> Trial:
    """Measure decoding and update for a prompt of `prompt` tokens; raise InputError where the run itself would."""
    model, meta = config.model, MetaNetworks()
    place, _ = model_paths(model.path)
    network: transformers.PreTrainedModel = build_on_meta(lambda: _build(model.path, place), DTYPES[model.dtype])
    network.requires_grad_(False)
    network.config._experts_implementation = "grouped_mm"  # a loop over experts would read values, which do not exist
    weights, shapes = size(network), {name: tuple(p.shape) for name, p in network.named_parameters()}
    if model.quantise:
        quantisation.quantise(network, model.quantise)
    begun = None if model.lora is None else initial_lora.adapters(model, initial_lora.read(model), network)
    trained = add_adapters({initial_lora.NETWORK: network}, model.lora, begun)
    if model.gradient_checkpointing and not can_checkpoint(network):
        checkpoint_gradients(network)  # raises InputError
    meta.empty(network, ())
    predictor = _UnprobedPredictor(network, block_size(config))
    ids = torch.ones(1, prompt + model.length, dtype=torch.long)
    training, evaluation = training_decoder(config), evaluation_decoder(config)
    asked: dict[str, Any] = {
        "drafts": config.algorithm.credit.name == "step_gain",
        "splits": config.algorithm.tree.branching(training).depth if training.cache else 0,
    }
    decode, operations = _measure_decoding(meta, predictor, training, ids, **asked)
    evaluate, evaluate_operations = None, operations
    if _work(training, **asked) != _work(evaluation):
        evaluate, evaluate_operations = _measure_decoding(meta, predictor, evaluation, ids)
    meta.with_gradients([network])
    update, checkpointed, forward = Peaks(), None, (0, 0)
    if not model.gradient_checkpointing:
        update, *forward = _measure_update(meta, predictor, ids, prompt)
    if can_checkpoint(network):
        checkpoint_gradients(network)
        checkpointed, *forward = _measure_update(meta, predictor, ids, prompt)
    return Trial(
        components={initial_lora.NETWORK: weights},
        shapes={initial_lora.NETWORK: shapes},
        width=torch.finfo(DTYPES[model.dtype]).bits // 8,
        trained=trained,
        decode=decode,
        evaluate=evaluate,
        update=update,
        update_checkpointed=checkpointed,
        dequantises=model.quantise is not None,
        decode_operations=operations,
        evaluate_operations=evaluate_operations,
        update_operations=forward[0],
        launches=forward[1],
    )


def _work(decoder: Decoder, *, drafts: bool = False, splits: int = 0) -> tuple[object, ...]:
    """Return a key: decoders with equal keys have steps of equal memory and operations."""
    steps = count_decoder_steps(decoder).steps if decoder.cache else None
    region = decoder.region
    return steps, decoder.guided, decoder.cache, decoder.hidden_layers, region.blocks, region.counted, drafts, splits


@torch.no_grad()
def _measure_decoding(
    meta: MetaNetworks,
    predictor: _UnprobedPredictor,
    decoder: Decoder,
    ids: torch.Tensor,
    *,
    drafts: bool = False,
    splits: int = 0,
) -> tuple[Peaks, int]:
    """Return the peak memory of a decoder's steps, and the mean operations of a step.

    Only the first and the last block are measured; only the last, if every step evaluates the whole canvas. With a cache
    the first step of a block computes more than its later ones, so two steps of each block are measured. With `drafts` a
    step has the logits of all columns from its block on, and the answer's predictions are recorded. With `splits` of a tree
    the last block runs beside as many caches, from which other branches go on later.
    """
    prompt, mask = ids.shape[1] - decoder.region.length, torch.ones_like(ids, dtype=torch.bool)
    parts = decoder.region.parts(torch.tensor([prompt]))
    blocks = [(prompt + int(s), prompt + int(e)) for s, e in parts if s < e]
    plain, peaks = predictor.form, Peaks()
    if decoder.cache is not None:
        predictor.form = Form("4d")
    cache = build_cache(predictor, decoder.cache, decoder.frame.place) if decoder.cache else None
    differ = cache is not None or predictor.block_size is not None or drafts
    ends = [blocks[0], blocks[-1]] if differ else [blocks[-1]]
    steps = list(ends) if cache is None else [block for block in dict.fromkeys(ends) for _ in range(2)]
    if cache is not None and predictor.block_size is not None and len(blocks) > 2:
        steps.insert(2, blocks[-2])  # so that the cache holds the block before the last when the last begins
    operations: dict[tuple[int, int], list[int]] = defaultdict(list)
    with meta.phase() as live, meta.inside():
        recorded = torch.zeros(1, decoder.most_steps if drafts else 0, decoder.region.length, dtype=torch.int32)
        waiting: list[Cache] = []
        for start, end in steps:
            if cache is not None and end == ends[-1][1] and not waiting:
                waiting = [cache.branch() for _ in range(splits)]
                for each in waiting:
                    each.repeat(torch.tensor([0]), torch.tensor([0]))
            stop = ids.shape[1] if drafts else end
            hidden, before = (), live.operations
            if cache is not None:
                logits = cache.logits(ids, mask, torch.tensor([0]), start=start, stop=stop)
            elif decoder.guided:
                logits = predictor.guide(ids, None, 1.0, prompt=prompt, start=start, stop=stop)
            else:
                layers = decoder.hidden_layers
                logits, hidden = predictor.logits_and_hidden(ids, None, start=start, stop=stop, layers=layers)
            if drafts:
                logits.flatten(0, 1).clone().argmax(-1)  # of the masked columns, at first of all
                logits = logits[:, : end - start]
            logits.log_softmax(-1).exp().argmax(-1)  # as scorers and proposals do
            del logits, hidden
            if (start, end) in ends:
                peaks |= live.peaks
                operations[start, end].append(live.operations - before)
            live.lower()
        del cache, waiting, recorded
    predictor.form = plain
    later = max(count_decoder_steps(decoder).steps / len(blocks) - 1, 0.0)  # steps of a block after its first
    means = [(first + later * rest[0]) / (1 + later) if rest else first for first, *rest in operations.values()]
    return peaks, round(sum(means) / len(means))


def _build(path: str, place: str) -> transformers.PreTrainedModel:
    written = config_of(place)
    known = architectures.architecture(written)
    if known is not None:
        return known.model(architectures.build_config(path, written))
    config = transformers.AutoConfig.from_pretrained(place)
    kind = transformers.AutoModelForMaskedLM
    if config.model_type not in transformers.models.auto.modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        kind = transformers.AutoModelForCausalLM
    return kind.from_config(config)


def _measure_update(
    meta: MetaNetworks, predictor: MaskPredictor, ids: torch.Tensor, prompt: int
) -> tuple[Peaks, int, int]:
    """Return peak memory of forward and backward of one view of a whole answer; operations and launches of the forward."""
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
    with meta.phase() as live, meta.inside():
        log_prob = log_probs(predictor, answers, views, Call(torch.tensor([0]), torch.tensor([0]))).sum()
        operations, launches = live.operations, live.launches
        log_prob.backward()
        return live.peaks, operations, launches
