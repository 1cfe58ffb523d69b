"""The table of decoders: each is five words, for what is proposed, scored, modified and committed, and where, and numbers.

To add a decoder, add a row. Any word of a row, and any number, can be replaced by the user.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pydantic import Field, create_model

from flowgrpo.errors import InputError, nearest
from flowgrpo.mdlm.decoding import committers, controllers, modifiers, regions, scorers
from flowgrpo.mdlm.decoding.decode import Decoder, Scorer
from flowgrpo.mdlm.decoding.proposals import Sample
from flowgrpo.mdlm.decoding.step import Fraction, Setting
from flowgrpo.schema.base import Count, NotNegative, Strict
from flowgrpo.schema.lazy import lazy
from flowgrpo.schema.sentences import checked

if TYPE_CHECKING:
    from flowgrpo.mdlm.decoding import trace_lock
    from flowgrpo.mdlm.decoding.predictor import MaskPredictor
else:
    trace_lock = lazy("flowgrpo.mdlm.decoding.trace_lock")

Row = dict[str, Any]
Natural = Annotated[int, Field(ge=0)]
Tokens = Annotated[list[Natural], Field(strict=False)]  # or, from Python, any other sequence

_WHOLE = {"name": "blocks"}
_DREAM = {"name": "remaining"}
_REFINEMENT = {"name": "threshold", "threshold": 0.95, "share": True}
_EOSER = {"name": "eoser", "low": 0.4, "high": 1.0}
_ASCENDING_EOSER = {"name": "eoser", "low": 0.01, "high": 1.0, "progress": "ascending"}


def _row(scorer: str, committer: Row, region: Row, *changes: Row) -> Row:
    return {
        "proposal": {"name": "sample"},
        "scorer": {"name": scorer},
        "modifiers": list(changes),
        "committer": committer,
        "region": region,
    }


DECODERS: dict[str, Row] = {
    "low_confidence": _row("confidence", {"name": "even"}, _WHOLE),  # LLaDA, arXiv 2502.09992
    "random": _row("uniform", {"name": "even"}, _WHOLE),  # the same
    "left_to_right": _row("left_to_right", {"name": "even"}, _WHOLE),  # JustGRPO, arXiv 2601.15165
    "origin": _row("uniform", {"name": "bernoulli"}, _WHOLE),  # Dream's code, as are the next three
    "maskgit_plus": _row("sampled", _DREAM, _WHOLE),
    "topk_margin": _row("margin", _DREAM, _WHOLE),
    "entropy": _row("entropy", _DREAM, _WHOLE),
    "threshold": _row("confidence", {"name": "threshold", "threshold": 0.9}, _WHOLE),  # Fast-dLLM, arXiv 2505.22618
    "factor": _row("confidence", {"name": "factor", "factor": 1.0}, _WHOLE),
    "block_refinement": _row("confidence", _REFINEMENT, _WHOLE),  # diffusers' scheduler, without its editing
    "eoser": _row("confidence", {"name": "even"}, _WHOLE, _EOSER),  # arXiv 2509.23924, as are the next two
    "ass": _row("confidence", {"name": "ascending"}, {"name": "ascending"}),
    "eoser_ass": _row("confidence", {"name": "ascending"}, {"name": "ascending"}, _ASCENDING_EOSER),
    "trace_lock": _row(  # arXiv 2605.24697; its scorer needs a trained controller
        "learned",
        {"name": "threshold", "threshold": 0.99, "most": 4},
        {"name": "blocks", "window": 128},
        {"name": "held_back"},
    ),
    "scheduled": _row(  # Co-GRPO, arXiv 2512.22288, a reconstruction: see flowgrpo/mdlm/methods/learned_schedule.py
        "confidence", {"name": "remaining", "least": 1}, _WHOLE, {"name": "gumbel", "temperature": 1.0}
    ),
}


@dataclass(frozen=True)
class _Place:
    """What a choice is told: region, number of steps of the decode, end token, and the model where it is loaded."""

    region: regions.Region
    steps: int
    eos_id: int | None
    predictor: MaskPredictor | None

    @property
    def block_steps(self) -> int:
        blocks, size = len(self.region.ends), self.region.counted
        if size is not None:  # the length need not be whole blocks
            if self.steps * size % self.region.length:
                raise InputError(
                    f"decoder.steps: {self.steps} for {self.region.length} tokens are no whole number for a block of {size}"
                )
            return self.steps * size // self.region.length
        if self.steps % blocks:
            raise InputError(f"decoder.steps: {self.steps} does not divide into {blocks} blocks")
        return self.steps // blocks

    @property
    def end(self) -> int:
        if self.eos_id is None:
            raise InputError("decoder: it looks at the end of sequence, and the model has no such token")
        return self.eos_id


def _even(place: _Place) -> committers.Even:
    return committers.Even(place.block_steps)


def _ascending(place: _Place) -> committers.Ascending:
    ends = place.region.ends
    sizes = regions.ascending_sizes(ends[-1], len(ends))
    if regions.ascending(ends[-1], len(ends)).ends != ends:
        raise InputError("decoder.region: steps of ascending size need the region ascending")
    return committers.Ascending(sizes)


def _remaining(place: _Place, ratio: Fraction | None = None, least: Natural = 0) -> committers.Remaining:
    steps = place.block_steps
    return committers.Remaining(steps, committers.LinearTimes(steps) if ratio is None else ratio, least)


def _bernoulli(place: _Place, ratio: Fraction | None = None) -> committers.Bernoulli:
    steps = place.block_steps
    return committers.Bernoulli(steps, committers.LinearTimes(steps) if ratio is None else ratio)


def _threshold(
    place: _Place, threshold: NotNegative, share: bool = False, most: Count | None = None
) -> committers.Threshold:
    return committers.Threshold(threshold, place.block_steps if share else None, most)


def _factor(place: _Place, factor: NotNegative) -> committers.Factor:
    return committers.Factor(factor)


def _eoser(
    place: _Place, low: NotNegative, high: NotNegative, progress: Literal["linear", "ascending"] = "linear"
) -> modifiers.Eoser:
    return modifiers.Eoser(place.end, place.steps, low, high, progress)


def _gumbel(place: _Place, temperature: Setting) -> modifiers.Gumbel:
    return modifiers.Gumbel(temperature)


def _held_back(place: _Place, tokens: Tokens = ()) -> modifiers.HeldBack:
    padding = None if place.predictor is None else place.predictor.pad_id
    return modifiers.HeldBack((place.end, *([] if padding is None else [padding]), *tokens))


def _plain(scorer: Scorer) -> Callable[[_Place], Scorer]:
    return lambda place: scorer


def _learned(place: _Place, controller: str) -> Scorer:
    controllers.check_there(Path(controller))
    width = None if place.predictor is None else place.predictor.hidden_size
    return trace_lock.Learned(trace_lock.load_controller(controller, width))


SCORERS = {
    "confidence": _plain(scorers.confidence),
    "sampled": _plain(scorers.sampled),
    "margin": _plain(scorers.margin),
    "entropy": _plain(scorers.entropy),
    "uniform": _plain(scorers.uniform),
    "left_to_right": _plain(scorers.left_to_right),
    "learned": _learned,
}
MODIFIERS = {"eoser": _eoser, "gumbel": _gumbel, "held_back": _held_back}
COMMITTERS = {
    "even": _even,
    "ascending": _ascending,
    "remaining": _remaining,
    "bernoulli": _bernoulli,
    "threshold": _threshold,
    "factor": _factor,
}
REGIONS = {"blocks": regions.even, "ascending": regions.ascending}


class Others(Strict):
    """What a decoder has besides its five words."""

    steps: Count | None = None
    cfg_scale: Setting = 0.0
    suppressed: Tokens = []
    eos_early_stop: bool = False
    cache: Literal["prefix", "dual"] | None = None


def build(
    spec: str | Mapping[str, Any],
    length: int,
    eos_id: int | None = None,
    predictor: MaskPredictor | None = None,
    block_size: int | None = None,
) -> Decoder:
    """The decoder that a user has written, for completions of some length.

    A map has a `name` of the table; any of the five words, as a word or as a map with options (without its name: options of
    the row's own word); and of `steps` (one token a step if it is missing), `cfg_scale`, `suppressed`, `cache` and
    `eos_early_stop` (fill a row up with its end once a block has it).

    Args:
        eos_id: end of sequence, for decoders that look at it.
        predictor: the model, whose vocabulary and hidden states have to fit; None if it is not loaded yet.
        block_size: tokens of a block of a block-causal model that is not loaded yet.

    Raises:
        InputError: a word or an option is unknown or wrong, or they do not fit together.
    """
    if not isinstance(spec, str | Mapping):
        raise InputError(f"decoder: {spec!r} is neither a name nor a map, {nearest(str(spec), DECODERS)}")
    spec = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = spec.pop("name", "low_confidence")
    if str(name) not in DECODERS:
        raise InputError(f"decoder.name: {name!r} is unknown, {nearest(str(name), DECODERS)}")
    row = {**DECODERS[name]}
    for key in spec:
        if key not in (*row, *Others.model_fields):
            raise InputError(f"decoder.{key}: unknown key, {nearest(str(key), ['name', *row, *Others.model_fields])}")
    others = checked(Others, {key: spec.pop(key) for key in Others.model_fields if key in spec}, "decoder")
    changes = spec.pop("modifiers", row["modifiers"])
    if not isinstance(changes, list | tuple):
        raise InputError(f"decoder.modifiers: {changes!r} is not a list")
    listed = {f"modifiers.{i}": change for i, change in enumerate(changes)}
    row |= {axis: _replaced(axis, row[axis], written) for axis, written in spec.items()}

    region = _built("region", REGIONS, row["region"], length)
    block_size = block_size if predictor is None else predictor.block_size
    if block_size is not None:
        if row["region"]["name"] == "ascending":
            raise InputError("decoder.region: ascending blocks are none of this model's own, take blocks")
        region = regions.counted(region, block_size)
    place = _Place(region, _steps(row["committer"], others.steps, length), eos_id, predictor)
    decoder = Decoder(
        proposal=_built("proposal", {"sample": Sample}, row["proposal"]),
        scorer=_built("scorer", SCORERS, row["scorer"], place),
        modifiers=tuple(_built(at, MODIFIERS, _replaced(at, {}, change), place) for at, change in listed.items()),
        committer=_built("committer", COMMITTERS, row["committer"], place),
        region=region,
        cfg_scale=others.cfg_scale,
        suppressed=tuple(others.suppressed),
        stop_id=place.end if others.eos_early_stop else None,
        cache=others.cache,
    )
    _check(decoder)
    for token in decoder.suppressed if predictor is not None else ():
        if token >= predictor.vocab_size:
            raise InputError(f"decoder.suppressed: {token} is outside the vocabulary of {predictor.vocab_size} tokens")
    return decoder


def _steps(committer: Row, written: int | None, length: int) -> int:
    """Steps of a decode; where it takes as many as it needs, the most."""
    free = committer["name"] in ("ascending", "factor") or (
        committer["name"] == "threshold" and not committer.get("share")
    )
    if written is not None and free:
        raise InputError(f"decoder.steps: {committer['name']} takes as many steps as it needs")
    if committer["name"] == "ascending":
        return sum(map(len, regions.ascending_sizes(length)))
    return length if written is None else written


def _check(decoder: Decoder) -> None:
    likely = decoder.scorer in scorers.PROBABILITIES or decoder.hidden_layers > 0
    judged = isinstance(decoder.committer, committers.Threshold | committers.Factor)
    if not likely and (judged or any(isinstance(change, modifiers.Eoser) for change in decoder.modifiers)):
        raise InputError("decoder.scorer: thresholds, factors and eoser need one that is a probability, as confidence")
    if judged and any(isinstance(change, modifiers.Gumbel) for change in decoder.modifiers):
        raise InputError("decoder.modifiers: after gumbel scores are no probabilities, as threshold and factor need")


def _replaced(axis: str, row: Row, written: Any) -> Row:
    """An axis as written by a user; a map without a name, or with the row's own, replaces single options."""
    if isinstance(written, str):
        written = {"name": written}
    if not isinstance(written, Mapping):
        raise InputError(f"decoder.{axis}: {written!r} is neither a word nor a map of a name and options")
    return {**row, **written} if written.get("name", row.get("name")) == row.get("name") else dict(written)


def _built(axis: str, choices: Mapping[str, Callable[..., Any]], row: Row, *given: Any) -> Any:
    """The choice of an axis, from its options."""
    name = row.get("name")
    if str(name) not in choices:
        raise InputError(f"decoder.{axis}: {name!r} is unknown, {nearest(str(name), choices)}")
    choice = choices[name]
    options = {key: value for key, value in row.items() if key != "name"}
    known = list(inspect.signature(choice).parameters.values())[len(given) :]
    for key in options:
        if key not in [p.name for p in known]:
            hint = nearest(str(key), [p.name for p in known]) if known else "it has no options"
            raise InputError(f"decoder.{axis}.{key}: {name} has no such option, {hint}")
    types = get_type_hints(choice, include_extras=True)
    fields = {p.name: (types[p.name], ... if p.default is p.empty else p.default) for p in known}
    model = create_model(name, __base__=Strict, **fields)
    return choice(*given, **dict(checked(model, options, f"decoder.{axis}")))
