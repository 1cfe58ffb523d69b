"""Hints for failed groups (IGPO): parts of a known solution are put into new answers, which replace failed ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.decode import GIVEN, Rollout
from flowgrpo.schema.base import Choice, Count, Rate
from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.schema.imports.lazy import lazy

if TYPE_CHECKING:
    from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
    from samplers import noise
    from samplers.noise import Address
else:
    noise = lazy("samplers.noise")


class NoHints(Choice):
    """All answers are the model's own."""

    name: Literal["none"] = "none"


class Inpainting(Choice):
    """IGPO (arXiv 2509.10396): answer the prompts of a failed group again, with parts of a known solution given (`hints`).

    New answers that succeed replace failed ones.
    """

    name: Literal["inpainting"] = "inpainting"
    column: str = "completion"
    """Column of the prompts that has the solution."""
    reward: str | None = None
    """Name of the reward that decides whether an answer succeeds; null: the only reward."""
    success: float = 1.0
    """An answer succeeds if that reward is at least this."""
    replace: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Largest share of a group that is replaced."""
    chunk: Annotated[list[Count], Field(min_length=2, max_length=2)] | None = None
    """Least and most tokens of a chunk of the solution; null: in the paper's proportion to the length, 5 to 10 of 256."""
    share: Annotated[list[Rate], Field(min_length=2, max_length=2)] = [0.2, 0.6]
    """Least and largest share of the chunks that is given."""
    tail: Annotated[int, Field(ge=0)] | None = None
    """Number of tokens at the end of the answer that are never given; null: 30 of 256."""
    stretch: float = Field(1.5, ge=1)
    """Largest factor by which chunks are moved apart to fill an answer longer than the solution."""
    entropy: Rate = 0.2
    """Share of the given tokens that is trained on: those whose prediction has the largest entropy."""

    @model_validator(mode="after")
    def _ordered(self) -> Inpainting:
        for key in ("chunk", "share"):
            low, high = getattr(self, key) or (0, 0)
            if low > high:
                raise InputError(f"algorithm.hints.{key}: {low} is above {high}, write the least first")
        return self


def check_solutions(settings: NoHints | Inpainting, columns: Sequence[Mapping[str, Any]]) -> None:
    """Raise InputError if no training prompt has a solution, or a solution is not a text; `columns` has a map per prompt."""
    if settings.name == "none":
        return
    for solution in (row.get(settings.column) for row in columns):
        if not isinstance(solution, str | None):
            raise InputError(f"algorithm.hints.column: {settings.column!r} holds {solution!r}, a solution is a text")
    if not any(row.get(settings.column) for row in columns):
        others = ", ".join(columns[0]) or "no columns"
        raise InputError(f"algorithm.hints.column: no training prompt has {settings.column!r}, they have {others}")


def draw_hints(
    settings: Inpainting, solutions: Sequence[Tensor], *, length: int, mask_id: int, seeds: Sequence[Address]
) -> Tensor:
    """Return hints (B, L): some tokens of each answer's solution, and the mask token elsewhere."""
    options: dict[str, Any] = {
        "chunk": settings.chunk or [max(1, length * part // 256) for part in (5, 10)],
        "share": settings.share,
        "tail": settings.tail if settings.tail is not None else length * 30 // 256,
        "stretch": settings.stretch,
    }
    pairs = zip(solutions, seeds, strict=True)
    return torch.stack([hints(solution, length, mask_id, seed, **options) for solution, seed in pairs])


def replace_failed(rewards: Tensor, settings: Inpainting, group_size: int) -> list[tuple[int, int]]:
    """Return pairs of indices: an answer of a failed group, and the hinted answer that replaces it.

    The first hinted answers whose deciding `rewards` succeed replace the first answers of the group, at most the share
    `settings.replace` of it.
    """
    better = (rewards >= settings.success).nonzero()[:, 0].tolist()
    return list(enumerate(better[: int(settings.replace * group_size)]))


def highest_entropy(
    predictor: MaskPredictor, rollout: Rollout, scope: Tensor, *, share: float, micro_batch: int
) -> Tensor:
    """Return the given tokens (B, L) bool to train on: in each row the `share` whose predictions have the largest entropy.

    At least one is chosen in each row with given tokens in `scope` (B, L) bool. Predictions are made with the whole answer
    hidden, or, in a block-causal model, the whole block. (Likelihood views show given tokens that are not trained on.)
    """
    given = scope & (rollout.step_map == GIVEN)
    chosen = torch.zeros_like(given)
    rows = given.any(1).nonzero()[:, 0]
    for part in rows.split(micro_batch) if len(rows) else ():
        ids = rollout.ids[part].clone()
        ids[:, rollout.prompt :] = predictor.mask_id
        clean = {} if predictor.block_size is None else {"clean": rollout.ids[part]}
        where = torch.nn.functional.pad(given[part], (rollout.prompt, 0))
        with torch.no_grad():
            log_probs = predictor.logits_at(ids, rollout.attention_mask[part], where, **clean).float().log_softmax(-1)
        entropy = torch.special.entr(log_probs.exp()).sum(-1)  # (N,)
        for row, own in zip(part.tolist(), entropy.split(given[part].sum(1).tolist()), strict=True):
            positions = given[row].nonzero()[:, 0]
            number = max(1, int(share * len(positions)))
            chosen[row, positions[own.argsort(descending=True, stable=True)[:number]]] = True
    return chosen


def hints(
    reasoning: Tensor,
    length: int,
    mask_id: int,
    seed: Address,
    *,
    chunk: Sequence[int] = (5, 10),
    share: Sequence[float] = (0.2, 0.6),
    tail: int = 30,
    stretch: float = 1.5,
) -> Tensor:
    """Return fixed tokens (L,) of a completion: random chunks of a solution near their positions in it, else `mask_id`.

    IGPO (arXiv 2509.10396 and its code). `reasoning` (n,) is the solution without its final answer. It is cut into chunks,
    and a random share of them is revealed, never the last one. Their starts are multiplied by (L - tail) / n, clamped to
    1..`stretch`. `chunk` and `share` are the bounds of uniform draws. The last `tail` positions are left to the
    final answer. Our readings: a chunk stays in one piece, only its beginning moves; the share is of all chunks, rounded
    down; a chunk that would end after L - tail is not revealed. Raises InputError if the tail leaves no room.
    """
    if not 0 <= tail < length:
        raise InputError(f"inpainting.tail: {tail} is not between 0 and the length {length}")
    random = noise.generator(seed, "hints")
    starts, ends = [], [0]
    while ends[-1] < len(reasoning):
        starts.append(ends[-1])
        ends.append(min(ends[-1] + int(random.integers(chunk[0], chunk[1], endpoint=True)), len(reasoning)))
    count = int(random.uniform(share[0], share[1]) * len(starts))
    revealed = random.permutation(max(len(starts) - 1, 0))[:count]
    factor = min(max((length - tail) / max(len(reasoning), 1), 1.0), stretch)
    fixed = torch.full((length,), mask_id, dtype=torch.long, device=reasoning.device)
    for i in revealed:
        tokens = reasoning[starts[i] : ends[i + 1]]
        start = int(starts[i] * factor)
        if start + len(tokens) <= length - tail:
            fixed[start : start + len(tokens)] = tokens
    return fixed
