"""Steps of a decoder, counted without a model by running its committer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flowgrpo.mdlm.config import TextConfig
from flowgrpo.mdlm.decoding.decode import Decoder
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from flowgrpo.mdlm.decoding.rules.commit_rules import Ascending, Committer, Even, Remaining
from flowgrpo.mdlm.decoding.tokens.step import DecodeStep
from flowgrpo.mdlm.methods.schedules.learned_schedule import Chosen, apply_actions
from flowgrpo.mdlm.models.load import block_size_of

NO_END = -1  # an end token that no answer holds, so that answers have full length


@dataclass(frozen=True, kw_only=True)
class DecodingCost:
    """Steps of a decoder for one answer."""

    steps: int
    commits: int  # steps that commit a token; in a block-causal model the most of one block
    branches: int  # model evaluations of a step: 2 with guidance
    fixed: bool  # whether all answers take the same number of steps
    # Tokens that each step commits, by block, for each place in a block where a prompt may end; one place if blocks begin
    # with the completion. If scores decide the steps, more steps and tokens than any answer has.
    blocks: tuple[tuple[tuple[int, ...], ...], ...]
    block_size: int | None = None  # tokens of a block of a block-causal model

    @property
    def evaluations(self) -> int:
        """Model evaluations for one answer."""
        return self.steps * self.branches


def block_size(config: TextConfig) -> int | None:
    """Return the tokens of a block of the model; None if its attention is full."""
    return block_size_of(config.model.path, config.model.attention, config.model.block_size)


def training_decoder(
    config: TextConfig, eos_id: int = NO_END, count: int = 1, predictor: MaskPredictor | None = None
) -> Decoder:
    """Return the training decoder for `count` answers.

    Settings that a learned schedule draws have their values in `algorithm.schedule.start`. Raises InputError if the
    schedule has an action that the decoder lacks, or the model does not fit the decoder.
    """
    length, algorithm = config.model.length, config.algorithm
    size = block_size(config) if predictor is None else None
    decoder = algorithm.decoder.build(length, eos_id, "algorithm.decoder", predictor=predictor, block_size=size)
    schedule = algorithm.schedule.policy(length)
    return decoder if schedule is None else apply_actions(decoder, schedule.typical(count))


def evaluation_decoder(config: TextConfig) -> Decoder:
    """Return the evaluation decoder for one answer; a learned schedule applies only to the decoder `scheduled`."""
    length = config.model.length
    decoder = config.eval.decoder.build(length, NO_END, "eval.decoder", block_size=block_size(config))
    schedule = config.algorithm.schedule.policy(length)
    learned = config.eval.decoder.name == "scheduled"
    return apply_actions(decoder, schedule.typical(1)) if schedule is not None and learned else decoder


def count_decoder_steps(decoder: Decoder) -> DecodingCost:
    """Return the steps of an answer of full length, or an upper bound if scores decide how many tokens a step commits.

    In a block-causal model the steps may depend on where the prompt ends within its block; the largest number counts.
    """
    committer, region = decoder.committer, decoder.region
    counted = isinstance(committer, Even | Ascending) or (
        isinstance(committer, Remaining) and not isinstance(committer.ratio, Chosen)
    )
    counted, branches = counted and not region.narrow, 2 if decoder.guided else 1
    fixed = counted and decoder.stop_id is None

    def of_block(size: int, block: int = 0) -> tuple[int, ...]:
        return _count_tokens(decoder, block, size) if counted else _bound_tokens(decoder, size)

    if region.counted is None:
        blocks = tuple(of_block(end - start, block) for block, (start, end) in enumerate(region.blocks))
        return DecodingCost(
            steps=sum(map(len, blocks)),
            commits=sum(
                _commits(tokens, end - start) for tokens, (start, end) in zip(blocks, region.blocks, strict=True)
            ),
            branches=branches,
            fixed=fixed,
            blocks=(blocks,),
        )
    sizes = [of_block(size) for size in range(region.counted + 1)]
    lengths = torch.stack(
        [end - start for start, end in region.parts(torch.arange(region.counted))]
    )  # (parts, offsets)
    by_offset = tuple(tuple(sizes[size] for size in parts) for parts in lengths.T.tolist())
    steps = [sum(map(len, blocks)) for blocks in by_offset]
    return DecodingCost(
        steps=max(steps),
        commits=_commits(sizes[region.counted], region.counted)
        * ((region.block_size or region.counted) // region.counted),
        branches=branches,
        fixed=fixed and min(steps) == max(steps),
        blocks=by_offset,
        block_size=region.block_size,
    )


def _commits(tokens: tuple[int, ...], size: int) -> int:
    """Return how many steps commit some of the `size` tokens of a block, at most."""
    return min(sum(count > 0 for count in tokens), size)


def _count_tokens(decoder: Decoder, block: int, size: int) -> tuple[int, ...]:
    """Run the committer on equal scores; return how many of the `size` tokens of a block each step commits."""
    masked, tokens = torch.ones(1, size, dtype=torch.bool), list[int]()
    ids = torch.zeros(1, decoder.region.length, dtype=torch.long)
    while masked.any():
        step = DecodeStep(
            frame=decoder.frame,
            row=torch.zeros(1, dtype=torch.long),
            index=torch.tensor([len(tokens)]),
            in_block=len(tokens),
            block_masks=torch.tensor([decoder.region.counted or size]),
            block=block,
            start=0,
            open=masked,
            ids=ids,
            attention_mask=ids.bool(),
            prompt=0,
        )
        chosen = masked & decoder.committer(step, torch.zeros(masked.shape).masked_fill(~masked, -torch.inf))
        masked = masked & ~chosen
        tokens.append(int(chosen.sum()))
    return tuple(tokens)


def _bound_tokens(decoder: Decoder, size: int) -> tuple[int, ...]:
    """Return `size` for each step of a block of `size` tokens: `size` steps, unless the committer bounds its steps."""
    committer = decoder.committer
    assert isinstance(committer, Committer), "every committer of the tables is a Committer"
    bound = committer.block_steps(decoder.frame)
    steps = 0 if size == 0 else size if bound is None else size + bound if decoder.region.narrow else bound
    return (size,) * steps
