"""Known solutions in place of rollouts, for objectives that learn from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.decode import Rollout
from flowgrpo.mdlm.policy import TextPolicy


def check_lengths(policy: TextPolicy, prompts: Sequence[Prompt], column: str | None) -> None:
    """Raise InputError if a solution has more tokens than an answer of the policy.

    `column` is that of the solutions; None if the objective needs none.
    """
    if column is None:
        return
    longest = max(len(policy.tokens(prompt.columns[column])) for prompt in prompts)
    if longest > policy.length:
        raise InputError(
            f"model.length: the longest solution has {longest} tokens and an answer {policy.length}, take at least {longest}"
        )


def write_solutions(policy: TextPolicy, prompts: Sequence[Prompt], column: str) -> Rollout:
    """Return the solutions of prompts as answers that were written in one step, without evaluations.

    An end token follows a solution, and fills the rest of the canvas as behind a stop.
    """
    ids, mask = policy.prompts([prompt.text for prompt in prompts])
    rows = [policy.tokens(prompt.columns[column]) for prompt in prompts]
    completion = torch.full((len(rows), policy.length), policy.eos_id, device=ids.device)
    for row, tokens in zip(completion, rows, strict=True):
        row[: len(tokens)] = torch.tensor(tokens, device=ids.device)
    ends = torch.tensor([len(tokens) for tokens in rows], device=ids.device)
    filling = torch.arange(policy.length, device=ids.device) > ends[:, None]
    return Rollout(
        ids=torch.cat([ids, completion], dim=1),
        attention_mask=torch.nn.functional.pad(mask, (0, policy.length), value=True),
        step_map=filling.long(),
        commit_logp=torch.zeros(completion.shape, dtype=torch.float64, device=ids.device),
        nfe=torch.zeros_like(ends),
        steps=torch.ones_like(ends),
        branched=ends.new_zeros(len(rows), 0),
        drafts=ends.new_zeros(len(rows), 0, policy.length, dtype=torch.int32),
    )
