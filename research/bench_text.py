"""Measure the cost of decoding and likelihoods of texts relative to the model alone, in pairs, on one thread.

    OMP_NUM_THREADS=1 python research/bench_text.py [--rounds 15] [--json FILE] [--size digits|digits-32|large]

Each ratio compares two ways to do the same, which take turns in one process: CPU seconds of the first over those of the
second, pair by pair. Tables have the median and the quartiles over the pairs. The *bare model* repeats the same calls,
with tensors of the same shapes, the same cached keys and values, and its head on the same tokens, but nothing between
the calls. *To all tokens* applies the head to every token, as a plain call of the class does. Sizes are the embedded
model `digits` with 8 rows, its decoding with 32, and a random model of 12 layers x 256 and 32,000 tokens, whose head is
half of its weights. Rollouts are drawn at temperature 1, as in training. Prints tables in Markdown.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import paired
import torch
from paired import Prepared, Ratio, Work, exactly, in_turns
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

from flowgrpo.data.generators.tasks import problems
from flowgrpo.mdlm.decoding.decode import Decoder, Rollout, decode
from flowgrpo.mdlm.decoding.decoders import build
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from flowgrpo.mdlm.methods.backward import backward
from flowgrpo.mdlm.methods.likelihoods import likelihood
from flowgrpo.mdlm.methods.likelihoods.answers import Answers
from flowgrpo.mdlm.methods.objectives.aggregation import token_mean
from flowgrpo.mdlm.methods.objectives.bounds import LinearBound
from flowgrpo.mdlm.methods.objectives.objective import Objective, SequenceRatio, TokenRatio
from flowgrpo.mdlm.models.load import load_predictor
from flowgrpo.mdlm.policy import tokenised
from flowgrpo.training.weights.trained_weights import Weights, lora_config

Tensor = torch.Tensor

ALONE = " / bare"
BARE = {ALONE: False, " / bare, to all tokens": True}  # whether the head is on all tokens
PLAIN = "in blocks"  # the decoder that caches are compared with


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, its prompts, and the sizes of decoding and updates.

    Attributes:
        predictor: the model.
        prompt: (B, P) tokens, padded on the left.
        mask: (B, P) bool, true for tokens of the prompt.
        length: tokens of an answer.
        block: tokens of a block.
        steps: steps of a decode.
        threshold: threshold of the decoder `threshold`.
        micro_batch: rows in a call of the update.
        learns: whether likelihoods are measured, too.
    """

    predictor: MaskPredictor
    prompt: Tensor
    mask: Tensor
    length: int
    block: int
    steps: int
    threshold: float
    micro_batch: int
    learns: bool = True


@dataclass(frozen=True, kw_only=True)
class Call:
    """A recorded call of a model.

    Attributes:
        ids: tokens.
        given: other arguments, without the cache.
        kept: cached keys and values of each layer; None without a cache.
        kept_as: the model's name of the cache argument.
        headed: number of tokens whose logits were computed.
        learnt: whether a backward pass followed.
    """

    ids: Tensor
    given: dict[str, Any]
    kept: list[tuple[Tensor, Tensor]] | None
    kept_as: str
    headed: int
    learnt: bool

    def past(self) -> dict[str, DynamicCache]:
        """Return the cache argument as it was before the call."""
        if self.kept is None:
            return {}
        cache = DynamicCache()
        for keys, values in self.kept:
            layer = DynamicLayer()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            cache.layers.append(layer)
        return {self.kept_as: cache}


def digits(rows: int = 8, length: int = 20, *, learns: bool = True) -> Size:
    """Return the size of the embedded model, on its own problems."""
    predictor, words = load_predictor("digits")
    prompts = tokenised(words, [row["prompt"] for row in problems("countdown", "train", rows)], chat=False)
    width = max(map(len, prompts))
    prompt = torch.tensor([[predictor.pad_id] * (width - len(row)) + row for row in prompts])
    sizes = {"length": length, "block": 5, "steps": length, "threshold": 0.6, "micro_batch": 16}
    return Size(predictor=predictor, prompt=prompt, mask=prompt != predictor.pad_id, learns=learns, **sizes)


def large(
    *, layers: int = 12, width: int = 256, vocabulary: int = 32_000, rows: int = 4, length: int = 32, steps: int = 16
) -> Size:
    """Return the size of a random model with a large vocabulary."""
    sizes = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        rms_norm_eps=1e-5,
        max_position_embeddings=4 * length,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(sizes).eval()
    prompt = torch.randint(3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(1))
    return Size(
        predictor=MaskPredictor(model, mask_id=1, pad_id=0),
        prompt=prompt,
        mask=torch.ones_like(prompt, dtype=torch.bool),
        length=length,
        block=length // 4,
        steps=steps,
        threshold=0.9,
        micro_batch=8,
    )


SIZES: dict[str, Callable[[], Size]] = {
    "digits": digits,
    "digits-32": partial(digits, rows=32, learns=False),
    "large": large,
}


def decoders(size: Size) -> dict[str, Decoder]:
    """Return the measured decoders by name."""
    usual = {"name": "low_confidence", "steps": size.steps, "proposal": {"temperature": 1.0}}
    blocks = {"region": {"name": "blocks", "block_length": size.block}}
    written = {
        "low_confidence": {},
        "low_confidence at temperature 0": {"proposal": {"temperature": 0.0}},
        PLAIN: blocks,
        f"{PLAIN}, prefix cache": {**blocks, "cache": "prefix"},
        f"{PLAIN}, dual cache": {**blocks, "cache": "dual"},
        "threshold": {"name": "threshold", "steps": None, "committer": {"threshold": size.threshold}},
    }
    return {name: build({**usual, **spec}, size.length, 2, size.predictor) for name, spec in written.items()}


def completed(size: Size, decoder: Decoder) -> Rollout:
    """Complete all prompts."""
    seeds = [(0, "bench", i) for i in range(len(size.prompt))]
    return decode(size.predictor, size.prompt, decoder, seeds, attention_mask=size.mask)


@contextmanager
def recorded(predictor: MaskPredictor) -> Iterator[list[Call]]:
    """Record the calls of the model inside this context."""
    calls: list[Call] = []
    headed: list[int] = []

    def before(_: torch.nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        name = predictor.cache_argument
        cache = given.get(name)
        kept = None if cache is None else [(layer.keys, layer.values) for layer in cache.layers]
        others = {key: value for key, value in given.items() if key != name}
        learnt = torch.is_grad_enabled()
        calls.append(Call(ids=args[0], given=others, kept=kept, kept_as=name, headed=0, learnt=learnt))

    def at_head(_: torch.nn.Module, given: tuple[Tensor], __: Tensor) -> None:
        headed.append(given[0].shape[:-1].numel())

    hooks = [
        predictor.model.register_forward_pre_hook(before, with_kwargs=True),
        predictor.head().register_forward_hook(at_head),
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
    calls[:] = [Call(**{**vars(call), "headed": count}) for call, count in zip(calls, headed, strict=True)]


def bare(predictor: MaskPredictor, calls: Sequence[Call], *, whole: bool = False) -> Work:
    """Return work that repeats calls of the model alone.

    Args:
        whole: whether the head is applied to all tokens.
    """
    pasts = [call.past() for call in calls]

    def work() -> None:
        for call, past in zip(calls, pasts, strict=True):
            with torch.set_grad_enabled(call.learnt):
                logits = _repeat(predictor, call, past, whole=whole)
                if call.learnt:
                    some = logits.flatten(0, -2)[: call.headed]
                    wanted = torch.zeros(len(some), dtype=torch.long)
                    torch.nn.functional.cross_entropy(some, wanted, reduction="sum").backward()

    return work


def _repeat(predictor: MaskPredictor, call: Call, past: Mapping[str, Any], *, whole: bool) -> Tensor:
    if whole or call.headed == call.ids.numel():
        return predictor.model(call.ids, **call.given, **past).logits
    chosen = predictor.head().register_forward_pre_hook(lambda _, given: given[0].flatten(0, 1)[None, : call.headed])
    try:
        return predictor.model(call.ids, **call.given, **past).logits
    finally:
        chosen.remove()


def beside(predictor: MaskPredictor, work: Work, calls: Sequence[Call]) -> dict[str, Work | Prepared]:
    """Return some work, the bare model's calls of it, and these calls with the head on all tokens."""
    return {"": work} | {label: Prepared(partial(bare, predictor, calls, whole=whole)) for label, whole in BARE.items()}


def decoding(name: str, size: Size, rounds: int) -> dict[str, Ratio]:
    """Return the ratios of decoders to the bare model, and of caches to none."""
    works: dict[str, Work | Prepared] = {}
    tokens: dict[str, int] = {}
    for kind, decoder in decoders(size).items():
        work = partial(completed, size, decoder)
        with recorded(size.predictor) as calls:
            work()
        tokens[kind] = sum(call.ids.numel() for call in calls)
        works |= {kind + label: make for label, make in beside(size.predictor, work, calls).items()}
    seconds = in_turns(works, rounds, paired.cpu)
    found = {
        f"{name}: {kind}{label}": paired.paired(seconds[kind], seconds[kind + label])
        for kind in tokens
        for label in BARE
    }
    for kind in (each for each in tokens if "cache" in each):
        for label, model in (("", ""), (", the model alone", ALONE)):
            found[f"{name}: {kind} / none{label}"] = paired.paired(seconds[kind + model], seconds[PLAIN + model])
        found[f"{name}: {kind} / none, tokens"] = exactly(tokens[kind] / tokens[PLAIN])
    return found


ESTIMATORS: dict[str, tuple[likelihood.Likelihood, Objective]] = {
    "one step": (likelihood.OneStep(), TokenRatio()),
    "coupled": (likelihood.Coupled(), SequenceRatio()),
    "quadrature": (likelihood.Quadrature(), SequenceRatio()),
    "quadrature, linear bound": (likelihood.Quadrature(), LinearBound()),
    "trajectory": (likelihood.Trajectory(), TokenRatio()),
}


def learning(size: Size, estimator: str) -> Callable[[Sequence[int] | None], int]:
    """Return a function that backpropagates an objective on some or all answers of a rollout, and returns the views."""
    views, objective = ESTIMATORS[estimator]
    rollout = completed(size, decoders(size)["low_confidence"])
    count = len(rollout.ids)
    given = Answers(
        ids=rollout.ids,
        attention_mask=rollout.attention_mask,
        scored=torch.ones_like(rollout.step_map, dtype=torch.bool),
        addresses=[(0, "views", i) for i in range(count)],
        steps=rollout.step_map,
    )

    def gradient(rows: Sequence[int] | None = None) -> int:
        answers = given if rows is None else given.of(torch.tensor(rows))
        made = views.views(answers)
        advantage = torch.ones(len(answers.ids))
        backward(
            size.predictor,
            answers,
            made,
            objective=objective,
            advantage=advantage,
            group=torch.zeros(len(advantage), dtype=torch.long),
            rank=torch.zeros_like(advantage),
            token_weight=token_mean(answers.scored, advantage, made.first),
            old=None,
            reference=None,
            micro_batch=size.micro_batch,
        )
        return int(made.scored.any(2).sum())

    return gradient


def estimating(name: str, size: Size, rounds: int) -> tuple[dict[str, Ratio], dict[str, float]]:
    """Return the ratios of likelihoods with gradients to bare passes, and of packing to none; and views per second."""
    modules = {"model": size.predictor.model.requires_grad_(False)}
    Weights(modules, lora_config(8, 8, "auto", modules))
    found, rates = {}, {}
    for estimator in ESTIMATORS:
        gradient = learning(size, estimator)
        together = partial(gradient, None)
        with recorded(size.predictor) as calls:
            views = together()
        works = beside(size.predictor, together, calls)
        works["one by one"] = partial(_each, gradient, len(size.prompt))
        seconds = in_turns(works, rounds, paired.cpu)
        own = f"{name}: {estimator}"
        found |= {own + label: paired.paired(seconds[""], seconds[label]) for label in BARE}
        found[f"{own}, packed / answer by answer"] = paired.paired(seconds[""], seconds["one by one"])
        rates[own] = views / statistics.median(seconds[""])
    return found, rates


def _each(gradient: Callable[[Sequence[int]], int], count: int) -> None:
    for row in range(count):
        gradient([row])


def everything(names: Sequence[str], rounds: int) -> Iterator[tuple[dict[str, Ratio], dict[str, float]]]:
    """Yield the ratios and the views per second of each part of each size, as soon as they are measured."""
    for name in names:
        size = SIZES[name]()
        yield decoding(name, size, rounds), {}
        if size.learns:
            yield estimating(name, size, rounds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = paired.parser(__doc__, rounds=15)
    parser.add_argument("--size", action="append", choices=list(SIZES), help="all, unless some are named")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found: dict[str, Ratio] = {}
    rates: dict[str, float] = {}
    for ratios_of, rates_of in everything(options.size or list(SIZES), options.rounds):
        found, rates = found | ratios_of, rates | rates_of
        paired.keep(found, options, views_per_second=rates)
    paired.tell(found, options, views_per_second=rates)
    if rates:
        print("\n| likelihood | views a second |\n|---|---|")
    for label, rate in rates.items():
        print(f"| {label} | {rate:.0f} |")


if __name__ == "__main__":
    main()
