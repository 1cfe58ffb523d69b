"""Requests to an engine of texts: refuse runs that it cannot sample for, and build requests for the others.

A request says how tokens are drawn, and how many. The engine's own settings decide which positions are committed at each
step; its answer has a step map, and a rollout needs no more. Requests have no tokens of the answer, and no guidance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flowgrpo.errors import InputError
from flowgrpo.mdlm.config import TextConfig
from flowgrpo.mdlm.decoding.decode import Decoder
from flowgrpo.schema.engine import Engine
from flowgrpo_engine import service
from flowgrpo_engine.service import INSTEAD, KEY

if TYPE_CHECKING:
    from flowgrpo_engine.text.answer import Asked

TOLD = ("temperature", "top_p", "top_k", "max_new_tokens", "ignore_eos", "sampling_seed")  # in each request
ALL = -1  # top_k that keeps all tokens


def check(config: TextConfig, decoder: Decoder) -> None:
    """Refuse a run that an engine cannot roll out for, by its configuration.

    Args:
        decoder: decoder of training.

    Raises:
        InputError: the sentence says what to set instead.
    """
    service.check(config)
    algorithm, section, place = config.algorithm, config.run.engine, decoder.frame.place
    assert section is not None, "asked of runs with an engine"
    if algorithm.schedule.name != "none":
        raise InputError(f"algorithm.schedule: an engine cannot get other settings for each step; take none, {INSTEAD}")
    if algorithm.hints.name != "none":
        raise InputError(
            f"algorithm.hints: an engine cannot start from given tokens of an answer; take none, {INSTEAD}"
        )
    if decoder.guided:
        raise InputError(f"{place}.cfg_scale: an engine has no guidance for texts; set it to 0, {INSTEAD}")
    if decoder.suppressed:
        raise InputError(f"{place}.suppressed: an engine cannot suppress tokens; remove it, {INSTEAD}")
    if decoder.cache is not None:
        raise InputError(f"{place}.cache: an engine manages its own cache; remove it, {INSTEAD}")
    if decoder.modifiers or decoder.hidden_layers:
        word = "modifiers" if decoder.modifiers else "scorer"
        raise InputError(
            f"{place}.{word}: an engine scores proposals itself; take a decoder without it, such as low_confidence, "
            f"{INSTEAD}"
        )
    proposal = decoder.proposal
    if not isinstance(proposal.temperature, int | float):
        raise InputError(
            f"{place}.proposal.temperature: an engine has one temperature for all steps; give a number, {INSTEAD}"
        )
    if section.untold:
        raise InputError(
            f"{KEY}.untold: it names arguments of model.call, which language models do not have; remove it"
        )
    if section.log_probs and not decoder.recorded:
        raise InputError(
            f"{KEY}.log_probs: an engine's log-probabilities are comparable only if tokens are drawn from the "
            f"model's whole distribution; set {place}.proposal to {{temperature: 1}}, or log_probs to false"
        )
    if not section.log_probs and "truncate" in section.model_fields_set:
        raise InputError(
            f"{KEY}.truncate: it bounds ratios to an engine's log-probabilities; set {KEY}.log_probs=true, or remove it"
        )
    for name in section.options:
        if name in TOLD:
            raise InputError(f"{KEY}.options: algorithm.decoder and model.length set {name}; remove it")


def request_of(asked: Sequence[Asked], decoder: Decoder, section: Engine, adapter: str | None) -> dict[str, Any]:
    """Return the request for completions of one or several prompts.

    Args:
        adapter: name of the adapter to use; None for the model alone.
    """
    proposal, temperature = decoder.proposal, decoder.proposal.temperature
    assert not callable(temperature), "check refuses one of each step"
    drawn = {
        "temperature": float(temperature),
        "top_p": proposal.top_p,
        "top_k": ALL if proposal.top_k is None else proposal.top_k,
        "max_new_tokens": decoder.region.length,
        "ignore_eos": decoder.stop_id is None,
        **section.options,
    }
    return {
        "rid": [each.name for each in asked],
        "input_ids": [each.prompt for each in asked],
        "sampling_params": [{**drawn, "sampling_seed": each.seed} for each in asked],
        "return_step_maps": True,
        **({"return_logprob": True} if section.log_probs else {}),
        **({} if adapter is None else {"lora_path": [adapter] * len(asked)}),
    }
