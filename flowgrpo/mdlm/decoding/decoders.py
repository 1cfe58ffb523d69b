"""The table of decoders. Each row names a proposal, a scorer, modifiers, a committer and a region, with their options.

To add a decoder, add a row; the comment above it says what it does and gives its source. The user can replace any choice
of a row, such as the scorer, and any of its options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.decode import Decoder
from flowgrpo.mdlm.decoding.rules import commit_rules, confidence, logit_modifiers
from flowgrpo.mdlm.decoding.rules.logit_modifiers import Tokens
from flowgrpo.mdlm.decoding.tokens import regions
from flowgrpo.mdlm.decoding.tokens.step import Frame, Setting
from flowgrpo.mdlm.decoding.tokens.token_proposals import Sample
from flowgrpo.schema import preset_overrides
from flowgrpo.schema.base import Choice, Count, Strict, named
from flowgrpo.schema.validation import checked
from rewards.base import nearest

if TYPE_CHECKING:
    from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor

DecoderRow = dict[str, Any]

_WHOLE = {"name": "blocks"}
_DREAM = {"name": "remaining"}
_REFINEMENT = {"name": "threshold", "threshold": 0.95, "share": True}
_EOSER = {"name": "eoser", "low": 0.4, "high": 1.0}
_ASCENDING_EOSER = {"name": "eoser", "low": 0.01, "high": 1.0, "progress": "ascending"}


def _row(scorer: str, committer: DecoderRow, region: DecoderRow, *changes: DecoderRow) -> DecoderRow:
    return {
        "proposal": {"name": "sample"},
        "scorer": {"name": scorer},
        "modifiers": list(changes),
        "committer": committer,
        "region": region,
    }


DECODERS: dict[str, DecoderRow] = {
    # The surest proposals first. LLaDA, arXiv 2502.09992.
    "low_confidence": _row("confidence", {"name": "even"}, _WHOLE),
    # Positions in random order. LLaDA, arXiv 2502.09992.
    "random": _row("uniform", {"name": "even"}, _WHOLE),
    # Positions from left to right. JustGRPO, arXiv 2601.15165.
    "left_to_right": _row("left_to_right", {"name": "even"}, _WHOLE),
    # Each position at random with the same probability. Dream's code.
    "origin": _row("uniform", {"name": "bernoulli"}, _WHOLE),
    # The likeliest of the sampled tokens first. Dream's code.
    "maskgit_plus": _row("sampled", _DREAM, _WHOLE),
    # The largest margin between the two likeliest tokens first. Dream's code.
    "topk_margin": _row("margin", _DREAM, _WHOLE),
    # The smallest entropy first. Dream's code.
    "entropy": _row("entropy", _DREAM, _WHOLE),
    # All proposals above a confidence, at least one. Fast-dLLM, arXiv 2505.22618.
    "threshold": _row("confidence", {"name": "threshold", "threshold": 0.9}, _WHOLE),
    # As many proposals as their least confidence allows. Fast-dLLM, arXiv 2505.22618.
    "factor": _row("confidence", {"name": "factor", "factor": 1.0}, _WHOLE),
    # All proposals above a confidence, at least the block's share of a step. LLaDA2, arXiv 2512.15745, as in diffusers'
    # scheduler, without its editing.
    "block_refinement": _row("confidence", _REFINEMENT, _WHOLE),
    # low_confidence with early ends damped. arXiv 2509.23924.
    "eoser": _row("confidence", {"name": "even"}, _WHOLE, _EOSER),
    # Steps that commit more and more tokens, in ascending blocks. arXiv 2509.23924.
    "ass": _row("confidence", {"name": "ascending"}, {"name": "ascending"}),
    # ass with early ends damped. arXiv 2509.23924.
    "eoser_ass": _row("confidence", {"name": "ascending"}, {"name": "ascending"}, _ASCENDING_EOSER),
    # Proposals that a trained controller expects to last. TraceLock, arXiv 2605.24697.
    "trace_lock": _row(
        "learned",
        {"name": "threshold", "threshold": 0.99, "most": 4},
        {"name": "blocks", "window": 128},
        {"name": "held_back"},
    ),
    # Settings drawn by a learned schedule. Co-GRPO, arXiv 2512.22288, reconstructed in methods/schedules.
    "scheduled": _row("confidence", {"name": "remaining", "least": 1}, _WHOLE, {"name": "gumbel", "temperature": 1.0}),
}


AXES: dict[str, Mapping[str, type[Choice]]] = {
    "proposal": named(Sample),
    "scorer": confidence.SCORERS,
    "committer": commit_rules.COMMITTERS,
    "region": named(regions.Blocks, regions.AscendingBlocks),
}
MODIFIERS = named(logit_modifiers.EarlyEosDamping, logit_modifiers.Gumbel, logit_modifiers.HeldBack)


class Others(Strict):
    """Options of a decoder besides its proposal, scorer, modifiers, committer and region."""

    steps: Count | None = None
    """Steps of a whole decode; null: one for each token."""
    cfg_scale: Setting = 0.0
    """Classifier-free guidance, for twice the evaluations; 0: none."""
    suppressed: Tokens = []
    """Tokens that are never written."""
    eos_early_stop: bool = False
    """Fill an answer up with its end once a block has it."""
    cache: Literal["prefix", "dual"] | None = None
    """Keys and values kept within a block: prefix, of the columns before it; dual, of all outside it; null: none."""


def build(
    spec: str | Mapping[str, Any],
    length: int,
    eos_id: int | None = None,
    predictor: MaskPredictor | None = None,
    block_size: int | None = None,
    *,
    place: str = "decoder",
) -> Decoder:
    """Build a decoder for completions of `length` tokens.

    Args:
        spec: a name of the table, or a map with `name`, any of the row's five keys and the keys of `Others`. The value of a
            row's key is the name of a choice or a map of options; a map without `name` changes options of the row's choice.
        eos_id: end-of-sequence token, for decoders that read it.
        predictor: the model, to check vocabulary and hidden states; None if it is not loaded yet.
        block_size: tokens of a block, for a block-causal model that is not loaded yet.
        place: dotted key of the decoder in the config, for errors.

    Raises:
        InputError: a name or an option is unknown or wrong, or the choices do not fit together.
    """
    if not isinstance(spec, str | Mapping):
        raise InputError(f"{place}: {spec!r} is neither a name nor a map, {nearest(str(spec), DECODERS)}")
    spec = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = spec.pop("name", "low_confidence")
    if str(name) not in DECODERS:
        raise InputError(f"{place}.name: {name!r} is unknown, {nearest(str(name), DECODERS)}")
    row = {**DECODERS[name]}
    for key in spec:
        if key not in (*row, *Others.model_fields):
            raise InputError(f"{place}.{key}: unknown key, {nearest(str(key), ['name', *row, *Others.model_fields])}")
    others = checked(Others, {key: spec.pop(key) for key in Others.model_fields if key in spec}, place)
    changes = spec.pop("modifiers", row["modifiers"])
    if not isinstance(changes, list | tuple):
        raise InputError(f"{place}.modifiers: {changes!r} is not a list")
    changes = tuple(_choose(MODIFIERS, {}, change, f"{place}.modifiers.{i}") for i, change in enumerate(changes))
    words = {axis: _choose(choices, row[axis], spec.get(axis, {}), f"{place}.{axis}") for axis, choices in AXES.items()}

    committer, region = words["committer"], words["region"].region(length, f"{place}.region")
    block_size = block_size if predictor is None else predictor.block_size
    if block_size is not None:
        if words["region"].name == "ascending":
            raise InputError(f"{place}.region: ascending blocks are not this model's own, take blocks")
        region = regions.fit_blocks(region, block_size, f"{place}.region")
    pad_id = None if predictor is None else predictor.pad_id
    steps = _steps(committer, others.steps, length, place)
    frame = Frame(region=region, steps=steps, eos_id=eos_id, pad_id=pad_id, place=place)
    committer.block_steps(frame)  # raises InputError if the steps do not divide into the blocks
    if others.eos_early_stop or any(change.ends for change in changes):
        _ = frame.end  # raises InputError for a model without an end token
    decoder = Decoder(
        proposal=words["proposal"],
        scorer=words["scorer"].load(None if predictor is None else predictor.hidden_size, f"{place}.scorer"),
        modifiers=changes,
        committer=committer,
        frame=frame,
        cfg_scale=others.cfg_scale,
        suppressed=tuple(others.suppressed),
        stop_id=frame.end if others.eos_early_stop else None,
        cache=others.cache,
    )
    _check(decoder)
    size = None if predictor is None else predictor.vocab_size
    for token in decoder.suppressed:
        if size is not None and token >= size:
            raise InputError(f"{place}.suppressed: {token} is outside the vocabulary of {size} tokens")
    return decoder


def _steps(committer: commit_rules.Committer, written: int | None, length: int, place: str) -> int:
    """Return the steps of a decode; for a committer that takes as many as it needs, an upper bound."""
    if written is not None and not committer.paced:
        raise InputError(f"{place}.steps: {committer.name} takes as many steps as it needs")
    if committer.name == "ascending":
        return sum(map(len, regions.ascending_sizes(length)))
    return length if written is None else written


def _check(decoder: Decoder) -> None:
    place = decoder.frame.place
    judged = isinstance(decoder.committer, commit_rules.Threshold | commit_rules.Factor)
    damped = any(isinstance(change, logit_modifiers.EarlyEosDamping) for change in decoder.modifiers)
    if not getattr(decoder.scorer, "probability", False) and (judged or damped):
        raise InputError(f"{place}.scorer: thresholds, factors and eoser need one that is a probability, as confidence")
    if judged and any(isinstance(change, logit_modifiers.Gumbel) for change in decoder.modifiers):
        raise InputError(f"{place}.modifiers: after gumbel scores are not probabilities, as threshold and factor need")


def _choose(choices: Mapping[str, type[Choice]], row: DecoderRow, written: Any, place: str) -> Any:
    """Merge the user's options for an axis into the row's, or replace these if the user names another choice; check them."""
    options = preset_overrides.options(row, {"name": written} if isinstance(written, str) else written, choices, place)
    return checked(choices[options["name"]], options, place)
