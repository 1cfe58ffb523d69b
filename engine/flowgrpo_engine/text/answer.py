"""What an engine sends of one completion: tokens, the step of each, and log-probabilities; every one of them is checked.

Steps are counted from 1, where something was committed, over the whole completion or anew in each block: blocks are filled
one after the other, so that both say the same. In a block that is there as a whole none may be missing. Of one that the end
of a completion cuts off some may be, since what the engine wrote behind it does not come back.
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
    """A completion that is asked for.

    Attributes:
        name: of it, in the run, which comes back.
        prompt: tokens.
        seed: of what is drawn.
    """

    name: str
    prompt: list[int]
    seed: int


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A completion that was sent.

    Attributes:
        tokens: up to its end.
        steps: of each token the step at which it was committed, from 0 over the whole completion.
        log_probs: of each token, as the engine has them; None where they were not asked for.
    """

    tokens: list[int]
    steps: list[int]
    log_probs: list[float] | None


def read(
    answer: Mapping[str, Any], asked: Asked, *, decoder: Decoder, predictor: MaskPredictor, log_probs: bool
) -> Sent:
    """A completion from an answer.

    Args:
        decoder: whose blocks the engine fills, and which says whether it may stop.
        log_probs: whether they were asked for.

    Raises:
        EngineError: it is of another prompt, or cannot have been decoded so.
    """
    about, tokens = answer.get("meta_info"), answer.get("output_ids")
    if not isinstance(about, dict) or not isinstance(tokens, list):
        raise EngineError("sent a completion without meta_info or output_ids")
    if about.get("id") != asked.name:
        raise EngineError(f"sent the completion {str(about.get('id'))[:80]!r} where {asked.name!r} was asked for")
    if about.get("prompt_tokens") != len(asked.prompt):
        raise EngineError(
            f"completed a prompt of {str(about.get('prompt_tokens'))[:20]} tokens, where {asked.name} has "
            f"{len(asked.prompt)}"
        )
    steps = about.get("step_maps")
    if not isinstance(steps, list):
        raise EngineError(
            "sent no meta_info.step_maps, the step of each token; see docs/engines.md for engines that do"
        )
    try:
        step_maps.check(asked.name, tokens, steps, length=decoder.region.length, predictor=predictor)
    except InputError as error:
        raise EngineError(f"sent what no decode leaves, {error}") from None
    _check_end(asked.name, tokens, decoder)
    return Sent(
        tokens=tokens,
        steps=over_all(asked.name, steps, blocks_of(decoder, len(asked.prompt))),
        log_probs=_log_probs(asked.name, about.get("output_token_logprobs"), tokens) if log_probs else None,
    )


def _check_end(name: str, tokens: Sequence[int], decoder: Decoder) -> None:
    """Refuse a completion that ends before it is full, unless by the end of sequence, where the decoder stops there."""
    length = decoder.region.length
    if len(tokens) < length and decoder.stop_id not in tokens:
        why = "" if decoder.stop_id is None else ", and none is the end of sequence"
        raise EngineError(f"sent {len(tokens)} of the {length} tokens of {name}{why}")


def blocks_of(decoder: Decoder, prompt: int) -> list[tuple[int, int, int]]:
    """Start, end, and end beyond the completion of each block behind a prompt of so many tokens."""
    region, found = decoder.region, []
    for start, end in region.parts(torch.tensor([prompt])):
        beyond = int(end)
        if region.counted is not None and beyond == region.length:
            beyond += -(prompt + beyond) % region.counted
        if end > start:
            found.append((int(start), int(end), beyond))
    return found


def over_all(name: str, steps: Sequence[int], blocks: Sequence[tuple[int, int, int]]) -> list[int]:
    """Steps from 0 over the whole completion, of steps that count so from 1, or from 1 in each block.

    Args:
        name: of the completion, in errors.
        blocks: see `blocks_of`.

    Raises:
        EngineError: a step is missing, or one of a later block does not come later.
    """
    found: list[int] = []
    taken = 0
    for start, end, beyond in blocks:
        own = steps[start:end]
        order = sorted(set(own))
        whole = start + len(own) == beyond
        numbers = [list(range(first, first + len(order))) for first in (1, taken + 1)]
        if own and order[0] < 1:
            raise EngineError(f"sent the step {str(order[0])[:20]} of {name}; they are counted from 1")
        if whole and order not in numbers:
            raise EngineError(
                f"sent steps of {name} that leave some out: its tokens {start} to {end - 1} have {_few(order)}, not "
                f"{_few(numbers[0])}{f' or {_few(numbers[1])}' if taken else ''}; does it fill other blocks than "
                "algorithm.decoder?"
            )
        found += [taken + order.index(step) for step in own]
        taken += len(order)
    return found


def _few(numbers: Sequence[int]) -> str:
    """Numbers, of which many are cut off in the middle."""
    words = [str(number)[:20] for number in numbers]
    return ", ".join(words if len(words) < 9 else [*words[:4], "...", words[-1]])


def _log_probs(name: str, written: Any, tokens: Sequence[int]) -> list[float]:
    """Log-probabilities as SGLang sends them: of each token a list that begins with the number and the token."""
    if not isinstance(written, list) or len(written) != len(tokens):
        has = len(written) if isinstance(written, list) else "no"
        raise EngineError(f"sent {has} output_token_logprobs of {name} for its {len(tokens)} tokens")
    found = []
    for token, each in zip(tokens, written, strict=True):
        if not isinstance(each, list) or len(each) < 2 or each[1] != token:
            raise EngineError(f"sent output_token_logprobs of {name} that are not of its tokens")
        if not isinstance(each[0], int | float) or not RANGE[0] <= each[0] <= RANGE[1]:  # nor NaN
            raise EngineError(
                f"sent the log-probability {str(each[0])[:40]} of {name}, not a finite number of at most 0"
            )
        found.append(float(each[0]))
    return found
