"""Read and check an engine's answer for one completion: its tokens, the step of each, and log-probabilities.

Steps that commit a token are counted from 1, over the whole completion or anew in each block. Both are equivalent, since
blocks are filled one after the other. In a complete block no step may be missing. In a block that the end of the completion
cuts off, steps may be missing, since the engine does not send the tokens behind the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding import step_maps
from flowgrpo.mdlm.decoding.decode import Decoder
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from flowgrpo_engine.service import EngineError

RANGE = (-1e6, 1e-3)  # of a log-probability: a sum in half precision may be rounded to a little more than 0


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A requested completion.

    Attributes:
        name: unique name, which the answer repeats.
        prompt: tokens of the prompt.
        seed: seed of the sampling.
    """

    name: str
    prompt: list[int]
    seed: int


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A completion that an engine sent.

    Attributes:
        tokens: tokens up to the end.
        steps: step at which each token was committed, counted from 0 over the whole completion.
        log_probs: the engine's log-probability of each token; None if not requested.
    """

    tokens: list[int]
    steps: list[int]
    log_probs: list[float] | None


def read(
    answer: Mapping[str, Any], asked: Asked, *, decoder: Decoder, predictor: MaskPredictor, log_probs: bool
) -> Sent:
    """Return the completion in an answer.

    Args:
        decoder: decoder with the engine's blocks; it also says whether a completion may stop early.
        log_probs: whether log-probabilities were requested.

    Raises:
        EngineError: the answer is for another prompt, or no decoding leaves such tokens and steps.
    """
    about, tokens = answer.get("meta_info"), answer.get("output_ids")
    if not isinstance(about, dict) or not isinstance(tokens, list):
        raise EngineError("sent a completion without meta_info or output_ids")
    if about.get("id") != asked.name:
        raise EngineError(f"sent the completion {str(about.get('id'))[:80]!r} instead of {asked.name!r}")
    if about.get("prompt_tokens") != len(asked.prompt):
        raise EngineError(
            f"completed a prompt of {str(about.get('prompt_tokens'))[:20]} tokens, where {asked.name} has "
            f"{len(asked.prompt)}"
        )
    steps = about.get("step_maps")
    if not isinstance(steps, list):
        raise EngineError(
            "sent no meta_info.step_maps, the step of each token; docs/research/engines.md names engines that send it"
        )
    try:
        step_maps.check(asked.name, tokens, steps, length=decoder.region.length, predictor=predictor)
    except InputError as error:
        raise EngineError(f"sent an answer that no decoding can produce, {error}") from None
    _check_end(asked.name, tokens, decoder)
    return Sent(
        tokens=tokens,
        steps=over_all(asked.name, steps, blocks_of(decoder, len(asked.prompt))),
        log_probs=_log_probs(asked.name, about.get("output_token_logprobs"), tokens) if log_probs else None,
    )


def _check_end(name: str, tokens: Sequence[int], decoder: Decoder) -> None:
    """Refuse a completion that is too short, unless the decoder stops early and the end of sequence is among the tokens."""
    length = decoder.region.length
    if len(tokens) < length and decoder.stop_id not in tokens:
        why = "" if decoder.stop_id is None else ", and none is the end of sequence"
        raise EngineError(f"sent {len(tokens)} of the {length} tokens of {name}{why}")


def blocks_of(decoder: Decoder, prompt: int) -> list[tuple[int, int, int]]:
    """Return the blocks after a prompt of `prompt` tokens: start, end in the completion, and end of the whole block.

    The two ends differ if the last block reaches beyond the completion.
    """
    region, blocks = decoder.region, []
    for start, end in region.parts(torch.tensor([prompt])):
        beyond = int(end)
        if region.counted is not None and beyond == region.length:
            beyond += -(prompt + beyond) % region.counted
        if end > start:
            blocks.append((int(start), int(end), beyond))
    return blocks


def over_all(name: str, steps: Sequence[int], blocks: Sequence[tuple[int, int, int]]) -> list[int]:
    """Return steps counted from 0 over the whole completion.

    Args:
        name: name of the completion in errors.
        steps: step of each token, counted from 1 over the whole completion or in each block.
        blocks: see `blocks_of`.

    Raises:
        EngineError: a step is below 1, or a complete block leaves one out.
    """
    numbered: list[int] = []
    taken = 0
    for start, end, beyond in blocks:
        of_block = steps[start:end]
        order = sorted(set(of_block))
        whole = start + len(of_block) == beyond
        numbers = [list(range(first, first + len(order))) for first in (1, taken + 1)]
        if of_block and order[0] < 1:
            raise EngineError(f"sent the step {str(order[0])[:20]} of {name}; the first step is 1")
        if whole and order not in numbers:
            raise EngineError(
                f"sent steps of {name} that leave some out: its tokens {start} to {end - 1} have {_few(order)}, not "
                f"{_few(numbers[0])}{f' or {_few(numbers[1])}' if taken else ''}; check that it decodes in the "
                "blocks of algorithm.decoder"
            )
        numbered += [taken + order.index(step) for step in of_block]
        taken += len(order)
    return numbered


def _few(numbers: Sequence[int]) -> str:
    """Return numbers as text; of nine or more, the first four and the last."""
    words = [str(number)[:20] for number in numbers]
    return ", ".join(words if len(words) < 9 else [*words[:4], "...", words[-1]])


def _log_probs(name: str, written: Any, tokens: Sequence[int]) -> list[float]:
    """Read log-probabilities as SGLang sends them: for each token, a list that begins with the number and the token."""
    if not isinstance(written, list) or len(written) != len(tokens):
        has = len(written) if isinstance(written, list) else "no"
        raise EngineError(f"sent {has} output_token_logprobs of {name} for its {len(tokens)} tokens")
    log_probs = []
    for token, each in zip(tokens, written, strict=True):
        if not isinstance(each, list) or len(each) < 2 or each[1] != token:
            raise EngineError(f"sent output_token_logprobs of {name} for other tokens than its own")
        if not isinstance(each[0], int | float) or not RANGE[0] <= each[0] <= RANGE[1]:  # NaN fails, too
            raise EngineError(
                f"sent the log-probability {str(each[0])[:40]} of {name}, not a finite number of at most 0"
            )
        log_probs.append(float(each[0]))
    return log_probs
