"""Help for groups that fail: IGPO's answers with parts of a known solution given, in place of failed ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flowgrpo.mdlm.axes import Inpainting
from flowgrpo.mdlm.decoding.decode import GIVEN, Rollout
from flowgrpo.mdlm.inpainting import hints
from flowgrpo.mdlm.policy import TextPolicy
from samplers.noise import Address

Tensor = torch.Tensor


def failed(values: Tensor, groups: Sequence[int], success: float) -> list[int]:
    """The groups of which no answer succeeded.

    Args:
        values: (B,) of the reward that decides, NaN for the lost, which have not.
        groups: (B,) of each answer.
    """
    won = {group for group, value in zip(groups, values.tolist(), strict=True) if value >= success}
    return [group for group in dict.fromkeys(groups) if group not in won]


def revealed(policy: TextPolicy, settings: Inpainting, solutions: Sequence[str], seeds: Sequence[Address]) -> Tensor:
    """Given tokens (B, L) for answers, from their solutions; the mask token elsewhere."""
    mask_id = policy.predictor.mask_id
    chunk = settings.chunk or [max(1, policy.length * part // 256) for part in (5, 10)]
    tail = settings.tail if settings.tail is not None else policy.length * 30 // 256
    rows = [
        hints(
            torch.tensor(policy.tokens(solution), dtype=torch.long, device=policy.device),
            policy.length,
            mask_id,
            seed,
            tuple(chunk),
            tuple(settings.share),
            tail,
            settings.stretch,
        )
        for solution, seed in zip(solutions, seeds, strict=True)
    ]
    return torch.stack(rows)


def exchanged(rewards: Tensor, settings: Inpainting, group_size: int) -> list[tuple[int, int]]:
    """Which answers of a failed group (place) give way to which hinted ones (place).

    The first that succeeded replace the first of the group, at most a share `replace` of it.

    Args:
        rewards: the deciding one of the hinted answers, at most one for each answer of the group.
    """
    better = (rewards >= settings.success).nonzero()[:, 0].tolist()
    return list(enumerate(better[: int(settings.replace * group_size)]))


@torch.no_grad()
def uncertain(policy: TextPolicy, rollout: Rollout, scope: Tensor, share: float, micro_batch: int) -> Tensor:
    """The given tokens (B, L) bool that are trained on: of each row the share whose prediction has the largest entropy.

    At least one of a row that has any in `scope` (B, L). The prediction is that of the wholly hidden answer, of a wholly
    hidden block where the model is block-causal; a view, though, shows the given tokens that are not trained on.
    """
    given = scope & (rollout.step_map == GIVEN)
    chosen = torch.zeros_like(given)
    rows = given.any(1).nonzero()[:, 0]
    for part in rows.split(micro_batch) if len(rows) else ():
        ids = rollout.ids[part].clone()
        ids[:, rollout.prompt :] = policy.predictor.mask_id
        known = {} if policy.predictor.block_size is None else {"clean": rollout.ids[part]}
        where = torch.nn.functional.pad(given[part], (rollout.prompt, 0))
        log_probs = (
            policy.predictor.logits_at(ids, rollout.attention_mask[part], where, **known).float().log_softmax(-1)
        )
        entropy = torch.special.entr(log_probs.exp()).sum(-1)  # (N,)
        for row, own in zip(part.tolist(), entropy.split(given[part].sum(1).tolist()), strict=True):
            places = given[row].nonzero()[:, 0]
            number = max(1, int(share * len(places)))
            chosen[row, places[own.argsort(descending=True, stable=True)[:number]]] = True
    return chosen
