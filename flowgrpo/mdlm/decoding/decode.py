"""Decoding of masked completions step by step; the rows of a batch are independent.

A decoder proposes a token for each open position, scores the proposals, modifies the scores, and commits some positions of
a region. Committed tokens stay. So `step_map` gives the canvas before any step s: all positions committed at step s or
later are masked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.tokens.branching import NO_BRANCHES, Branching, Place
from flowgrpo.mdlm.decoding.tokens.regions import Region
from flowgrpo.mdlm.decoding.tokens.step import DecodeStep, Draws, Frame, Setting, setting
from flowgrpo.mdlm.decoding.tokens.token_proposals import Proposed, Sample
from flowgrpo.mdlm.decoding.tree_growth import Canvases, TreeGrowth
from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.schema.imports.lazy import lazy

if TYPE_CHECKING:
    from flowgrpo.mdlm.decoding.network import kv_cache
    from flowgrpo.mdlm.decoding.network.kv_cache import Cache
    from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
    from samplers.noise import Address
else:
    kv_cache = lazy("flowgrpo.mdlm.decoding.network.kv_cache")

Scorer = Callable[[DecodeStep, Proposed], Any]  # returns a tensor, as do the next two
Modifier = Callable[[DecodeStep, Proposed, Any], Any]
Committer = Callable[[DecodeStep, Any], Any]

GIVEN = -1  # step of a token that was given, in a step map


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The parts and options of a decoder."""

    proposal: Sample
    scorer: Scorer  # its attribute `hidden_layers` is the number of hidden states it reads
    committer: Committer  # chooses open positions; others that it returns are ignored
    frame: Frame
    modifiers: tuple[Modifier, ...] = ()  # change the scores, in this order
    cfg_scale: Setting = 0.0  # classifier-free guidance; 0 for none
    suppressed: tuple[int, ...] = ()  # tokens that are never proposed
    # Once a block contains this token, it fills the later blocks without further steps; None decodes the whole row.
    stop_id: int | None = None
    # Keep the keys and values of the columns before a block (`prefix`), or of all columns outside it (`dual`). An
    # approximation, except for `prefix` in a block-causal model.
    cache: Literal["prefix", "dual"] | None = None

    def __post_init__(self):
        place = self.frame.place
        if self.cache and (self.guided or self.hidden_layers):
            raise InputError(f"{place}.cache: it goes neither with cfg_scale nor with a learned scorer")
        if self.cache == "dual" and self.region.counted is not None:
            raise InputError(f"{place}.cache: no block sees the later ones of this model, take prefix, which is exact")
        if self.guided and self.hidden_layers:
            raise InputError(f"{place}.cfg_scale: it does not go with a learned scorer")

    @property
    def region(self) -> Region:
        """The blocks to fill and their order."""
        return self.frame.region

    @property
    def guided(self) -> bool:
        """Return whether a step takes two evaluations."""
        return callable(self.cfg_scale) or self.cfg_scale != 0

    @property
    def recorded(self) -> bool:
        """Return whether `Rollout.commit_logp` is under the model's own distribution, as likelihoods compute it."""
        proposal = self.proposal
        tempered = callable(proposal.temperature) or proposal.temperature not in (0, 1)
        cut = proposal.top_p < 1 or proposal.top_k is not None or bool(self.suppressed)
        aged = self.cache is not None and self.region.block_size is None
        return not (tempered or cut or self.guided or aged)

    @property
    def most_steps(self) -> int:
        """Return the most steps that a row takes, for blocks that begin with the completion."""
        waits = self.region.narrow and getattr(
            self.committer, "paced", True
        )  # after its steps a window fills by itself
        return self.frame.steps + (self.region.length if waits else 0)

    @property
    def hidden_layers(self) -> int:
        """Number of hidden states that the scorer reads."""
        return getattr(self.scorer, "hidden_layers", 0)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """B decoded completions of L tokens, behind prompts of P columns."""

    ids: Tensor  # (B, P + L) canvas, every position filled
    attention_mask: Tensor  # (B, P + L) bool, False at padding
    # (B, L) step that committed each token, counted per row; -1 for given tokens; `steps` of the row for tokens that
    # filled it up behind a stop.
    step_map: Tensor
    # (B, L) float64 log-probability of each token when it was committed, under the distribution it was drawn from
    # (temperature 1 where the decoder's is 0); 0 for tokens that were given or lie behind a stop.
    commit_logp: Tensor
    # (B,) model evaluations: two for a guided step, one for a step with a cache; a shared step counts for every leaf
    nfe: Tensor
    steps: Tensor  # (B,) steps of each row
    branched: Tensor  # (B, S) steps that each row had taken at each split of its tree; S = 0 without trees
    # (B, T, L) int32 completion that the model held likeliest before each step, behind the tokens committed by then; T = 0
    # unless asked for
    drafts: Tensor

    @property
    def completion(self) -> Tensor:
        """Tokens (B, L)."""
        return self.ids[:, self.prompt :]

    @property
    def prompt(self) -> int:
        """Columns of the prompt."""
        return self.ids.shape[1] - self.step_map.shape[1]

    def canvas(self, step: int, mask_id: int) -> Tensor:
        """Return the ids (B, P + L) before a step."""
        ids = self.ids.clone()
        ids[:, self.prompt :][self.step_map >= step] = mask_id
        return ids


def decode(
    predictor: MaskPredictor,
    prompt: Tensor,
    decoder: Decoder,
    seeds: Sequence[Address] | None = None,
    *,
    attention_mask: Tensor | None = None,
    fixed: Tensor | None = None,
    micro_batch: int | None = None,
    branching: Branching = NO_BRANCHES,
    drafts: bool = False,
    landed: Callable[[Tensor, int], None] | None = None,
) -> Rollout:
    """Complete prompts; a row depends on its own prompt and seed only, up to rounding.

    With `branching` rows are leaves of trees, see `Branching`. The first leaf of a tree is what it would be alone.

    Args:
        prompt: (B, P) tokens, padded on the left; `attention_mask` is 0 or False at padding.
        seeds: an address of random numbers for each row, unique in the run; None for a deterministic decoder.
        fixed: (B, L) given tokens, and the mask token elsewhere (see `flowgrpo.mdlm.methods.hints`).
        micro_batch: largest number of rows to decode together.
        branching: every `branching.leaves` rows in turn are the leaves of a tree, and have one prompt.
        drafts: record what the model predicts at each step. No cache, and no block-causal model.
        landed: called each time that rows finish, with the completions (B, L) and the number of finished rows, which are
            the first ones.

    Raises:
        InputError: shapes do not fit, the model does not support the decoder, or the decoder was built for a model with
            other blocks.
        ValueError: the decoder draws random numbers and there are no seeds.
    """
    ids, mask = _build_canvas(predictor, prompt, decoder.region.length, attention_mask=attention_mask, fixed=fixed)
    if decoder.region.block_size != predictor.block_size:
        raise InputError(
            f"{decoder.frame.place}.region: it was not built for this model's blocks, hand build the predictor"
        )
    if seeds is not None and len(seeds) != len(ids):
        raise InputError(f"seeds: {len(seeds)} for {len(ids)} prompts")
    if len(ids) % branching.leaves:
        raise InputError(f"prompts: {len(ids)} rows are no whole trees of {branching.leaves} leaves")
    draws = None if seeds is None else Draws(seeds, decoder.region.length, ids.device)
    completion = ids[:, prompt.shape[1] :]
    canvases = Canvases(
        ids=ids,
        mask=mask,
        step_map=torch.full_like(completion, GIVEN),
        commit_logp=torch.zeros(completion.shape, dtype=torch.float64, device=ids.device),
        steps=ids.new_zeros(len(ids)),
        drafts=ids.new_zeros(len(ids), decoder.most_steps if drafts else 0, completion.shape[1], dtype=torch.int32),
    )
    trees = TreeGrowth(
        branching=branching,
        micro_batch=micro_batch or len(ids),
        fill=partial(_fill, predictor, decoder, draws),
        entropy=partial(_entropy, predictor, decoder),
        canvases=canvases,
        left=torch.full_like(canvases.steps, branching.depth),
        branched=ids.new_zeros(len(ids), branching.depth),
        landed=None if landed is None else lambda own, done: landed(own.ids[:, prompt.shape[1] :], done),
    )
    cache = kv_cache.build_cache(predictor, decoder.cache, decoder.frame.place) if decoder.cache else None
    roots = torch.arange(0, len(ids), branching.leaves, device=ids.device)
    with torch.no_grad():
        trees.grow(roots, roots, cache)
    return Rollout(
        ids=canvases.ids,
        attention_mask=mask,
        step_map=canvases.step_map,
        commit_logp=canvases.commit_logp,
        nfe=canvases.steps * (2 if decoder.guided else 1),
        steps=canvases.steps,
        branched=trees.branched,
        drafts=canvases.drafts,
    )


def _fill(
    predictor: MaskPredictor,
    decoder: Decoder,
    draws: Draws | None,
    canvases: Canvases,
    *,
    rows: Tensor,
    same: Tensor,
    span: Sequence[Place],
    cache: Cache | None,
) -> None:
    """Decode some rows in place, from the first place of `span` up to the second; `rows` (R,) are their numbers.

    Rows of equal `same` (R,) begin with the same canvas: their first step is evaluated once.
    """
    ids, mask, step_map, steps = canvases.ids, canvases.mask, canvases.step_map, canvases.steps
    prompt = ids.shape[1] - step_map.shape[1]
    completion = ids[:, prompt:]  # a view: writing to it changes `ids`
    position = torch.arange(completion.shape[1], device=ids.device)
    alike, fresh = len(same.unique_consecutive()) < len(same), torch.ones_like(rows, dtype=torch.bool)
    first, last = span
    for block, (starts, ends) in enumerate(decoder.region.parts(mask[:, :prompt].sum(1))):
        if not first[0] <= block <= last[0]:
            continue
        start, end = int(starts.min()), int(ends.max())
        inside = ((position >= starts[:, None]) & (position < ends[:, None]))[:, start:end]
        masked = inside & (completion[:, start:end] == predictor.mask_id)
        if decoder.stop_id is not None:
            stopped = (completion == decoder.stop_id) & (position < starts[:, None])
            skipped = masked & stopped.any(1, keepdim=True)
            completion[:, start:end][skipped] = decoder.stop_id
            step_map[:, start:end][skipped] = steps[skipped.nonzero()[:, 0]]
            masked &= ~skipped
        block_masks = (masked | inside & (step_map[:, start:end] != GIVEN)).sum(1)
        if decoder.region.counted is not None:
            block_masks = torch.full_like(steps, decoder.region.counted)
        for in_block in count(first[1] if block == first[0] else 0):
            row = (unfinished := masked.any(1)).nonzero()[:, 0]
            if not len(row) or (block, in_block) == last:
                break
            step = DecodeStep(
                frame=decoder.frame,
                row=rows[row],
                index=steps[row],
                in_block=in_block,
                block_masks=block_masks[row],
                block=block,
                start=start,
                open=decoder.region.open(masked[row]),
                ids=ids[row],
                attention_mask=mask[row],
                prompt=prompt,
                draws=draws,
            )
            drafts = canvases.drafts.shape[1] > 0
            lead = same.where(fresh, rows)[row] if alike and fresh[row].any() else None
            proposed, committed, draft = _step(predictor, decoder, step, cache, lead=lead, drafts=drafts)
            if drafts:
                canvases.drafts[row, steps[row]] = draft.int()
            chosen = committed[step.place].nonzero()[:, 0]
            at = row[step.owner[chosen]], step.position[chosen]
            masked[row] ^= committed
            completion[at] = proposed.tokens[chosen]
            step_map[at] = steps[at[0]]
            canvases.commit_logp[at] = proposed.log_prob[chosen].double()
            steps += unfinished
            fresh &= ~unfinished


def _entropy(predictor: MaskPredictor, decoder: Decoder, canvases: Canvases, block: int) -> Tensor:
    """Return the mean entropy (R,) of the masked tokens of a block, in nats; 0 without any."""
    ids, prompt = canvases.ids, canvases.ids.shape[1] - canvases.step_map.shape[1]
    starts, ends = decoder.region.parts(canvases.mask[:, :prompt].sum(1))[block]
    position = torch.arange(decoder.region.length, device=ids.device)
    masked = (ids[:, prompt:] == predictor.mask_id) & (position >= starts[:, None]) & (position < ends[:, None])
    logits = predictor.logits_at(ids, canvases.mask, torch.nn.functional.pad(masked, (prompt, 0)))
    each = torch.special.entr(logits.float().softmax(-1)).sum(-1)
    total = each.new_zeros(len(ids)).index_add(0, masked.nonzero()[:, 0], each)
    return total / masked.sum(1).clamp(min=1)


def _build_canvas(
    predictor: MaskPredictor, prompt: Tensor, length: int, *, attention_mask: Tensor | None, fixed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return ids (B, P + L) with a masked completion except for fixed tokens, and their attention mask (B, P + L)."""
    unknown = prompt.new_full((len(prompt), length), predictor.mask_id)
    if fixed is not None and fixed.shape != unknown.shape:
        raise InputError(f"fixed: its shape {tuple(fixed.shape)} is not {tuple(unknown.shape)}, prompts and length")
    known = torch.ones_like(prompt) if attention_mask is None else attention_mask
    ids = torch.cat([prompt, unknown if fixed is None else fixed.to(prompt)], dim=1)
    return ids, torch.cat([known.bool(), torch.ones_like(unknown, dtype=torch.bool)], dim=1)


def _step(
    predictor: MaskPredictor,
    decoder: Decoder,
    step: DecodeStep,
    cache: Cache | None,
    *,
    lead: Tensor | None,
    drafts: bool,
) -> tuple[Proposed, Tensor, Tensor]:
    """Return the proposals for the open positions, which of these (R, W) bool are committed, and the likeliest completion.

    The completion (R, L) has its masked tokens filled from the block on only with `drafts`. Rows of equal `lead` (R,) have
    the same canvas, which is evaluated once; None: no two rows have.
    """
    stop = step.prompt + step.start + step.open.shape[1]
    width, stop = step.open.shape[1], step.ids.shape[1] if drafts else stop
    if lead is None:
        logits, hidden = _evaluate(predictor, decoder, step, cache, stop=stop)
    else:
        shared, index, counts = lead.unique_consecutive(return_inverse=True, return_counts=True)
        first = step.of(counts.cumsum(0) - counts)
        logits, hidden = _evaluate(predictor, decoder, replace(first, row=shared), cache, stop=stop)
        logits, hidden = logits[index], tuple(states[index] for states in hidden)
        if cache is not None:
            cache.repeat(index, step.row)
    step = replace(step, hidden=hidden) if hidden else step
    draft = step.completion
    if drafts:
        masked = draft == predictor.mask_id
        masked[:, : step.start] = False
        draft = draft.masked_scatter(masked, _allowed(decoder, logits[masked[:, step.start :]]).argmax(-1))
        logits = logits[:, :width]
    logits = _allowed(decoder, logits[step.place])  # (N, V)
    proposed = decoder.proposal(step, logits)
    scores = decoder.scorer(step, proposed)
    for modifier in decoder.modifiers:
        scores = modifier(step, proposed, scores)
    table = torch.full(step.open.shape, -torch.inf, dtype=scores.dtype, device=scores.device)
    table[step.place] = scores
    return proposed, decoder.committer(step, table) & step.open, draft


def _evaluate(
    predictor: MaskPredictor, decoder: Decoder, step: DecodeStep, cache: Cache | None, *, stop: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return logits (R, W, V) of the W columns from the block's start to `stop`, and the states that the scorer reads."""
    columns = {"start": step.prompt + step.start, "stop": stop}
    if cache is not None:
        return cache.logits(step.ids, step.attention_mask, step.row, **columns), ()
    if decoder.guided:
        scale = setting(decoder.cfg_scale, step)
        return predictor.guide(step.ids, step.attention_mask, scale, prompt=step.prompt, **columns), ()
    return predictor.logits_and_hidden(step.ids, step.attention_mask, layers=decoder.hidden_layers, **columns)


def _allowed(decoder: Decoder, logits: Tensor) -> Tensor:
    """Return logits (N, V) with -inf for the tokens that the decoder suppresses."""
    if not decoder.suppressed:
        return logits
    return logits.index_fill(-1, torch.tensor(decoder.suppressed, device=logits.device), -torch.inf)
