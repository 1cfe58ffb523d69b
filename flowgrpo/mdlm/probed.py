"""The calls of a language model that sizes of batches are tried with: a decoding, and views of answers with gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from flowgrpo.data.prompts import Prompt
from flowgrpo.mdlm.decoding.decode import GIVEN, Decoder
from flowgrpo.mdlm.methods.answers import Answers
from flowgrpo.mdlm.methods.estimate import Call, log_probs
from flowgrpo.mdlm.methods.likelihood import Likelihood
from flowgrpo.mdlm.methods.views import Views
from flowgrpo.mdlm.policy import TextPolicy
from flowgrpo.training.batch_sizes import ProbeCalls
from flowgrpo.training.probing import Timed
from flowgrpo.training.weights import Weights


def probe_calls(
    policy: TextPolicy,
    weights: Weights,
    prompts: Sequence[Prompt],
    *,
    decoder: Callable[[int], Decoder],
    likelihood: Likelihood,
) -> ProbeCalls:
    """The calls, on the longest of some prompts; an answer takes part in a decoding, and has a number of views.

    A decoding is tried whole, for caches, guidance and how many tokens are open at a time are a part of what it takes.

    Args:
        weights: whose gradient an update takes.
        decoder: of so many answers.
    """
    longest = max((prompt.text for prompt in prompts), key=lambda text: len(policy.tokens(text)))

    def decode(count: int) -> None:
        policy.generate([longest] * count, decoder(count), [("probe", i) for i in range(count)], count)

    written = policy.generate([longest], decoder(1), [("probe", 0)], 1).rollout

    @cache
    def viewed(count: int) -> tuple[Answers, Views]:
        rows = torch.zeros(count, dtype=torch.long, device=written.ids.device)
        answers = Answers(
            ids=written.ids[rows],
            attention_mask=written.attention_mask[rows],
            scored=written.step_map[rows] != GIVEN,
            addresses=[("probe", i) for i in range(count)],
            steps=written.step_map[rows],
            block_size=policy.predictor.block_size,
        )
        return answers, likelihood.views(answers)

    def learn(count: int) -> None:
        answers, views = viewed(count)
        rows, chosen = views.scored.any(2).T.nonzero(as_tuple=True)
        call = Call(chosen[:count], rows[:count])
        weights.lockstep.backward(log_probs(policy.predictor, answers, views, call).sum())

    of_answer = int(viewed(1)[1].scored.any(2).sum())
    return ProbeCalls(rollout=[Timed(1, decode)], update=[Timed(of_answer, learn)])
