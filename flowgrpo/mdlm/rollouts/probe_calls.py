"""Calls of a language model that try out batch sizes: decoding, and views of answers with gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from flowgrpo.data.prompts import Prompt
from flowgrpo.mdlm.decoding.decode import GIVEN, Decoder
from flowgrpo.mdlm.methods.likelihoods.answers import Answers
from flowgrpo.mdlm.methods.likelihoods.estimate import Call, log_probs
from flowgrpo.mdlm.methods.likelihoods.likelihood import Likelihood
from flowgrpo.mdlm.methods.likelihoods.masked_views import Views
from flowgrpo.mdlm.policy import TextPolicy
from flowgrpo.training.fitting.batch_probing import Timed
from flowgrpo.training.fitting.batch_sizes import ProbeCalls
from flowgrpo.training.weights.trained_weights import Weights


def probe_calls(
    policy: TextPolicy,
    weights: Weights,
    prompts: Sequence[Prompt],
    *,
    decoder: Callable[[int], Decoder],
    likelihood: Likelihood,
    drafts: bool,
    held_out: Sequence[Prompt] = (),
    eval_decoder: Callable[[int], Decoder] | None = None,
) -> ProbeCalls:
    """Return the calls of a rollout and of an update, with a given number of rows of the longest prompt.

    A rollout call decodes the whole answer, because caches, guidance and the number of open tokens change its memory. The
    longest prompt of this process's `held_out` is tried too if it is longer or has another decoder (`eval_decoder`): it must
    fit, but its time does not count. With `drafts` rollouts record the model's predictions, see `decode`.
    """

    def length(text: str) -> int:
        return len(policy.tokens(text))

    def decoding(text: str, of: Callable[[int], Decoder], *, drafts: bool) -> Callable[[int], object]:
        return lambda count: policy.generate(
            [text] * count, of(count), [("probe", i) for i in range(count)], count, drafts=drafts
        )

    longest = max((prompt.text for prompt in prompts), key=length)
    evaluated = max((prompt.text for prompt in held_out), key=length, default=None)
    evaluations = []
    if evaluated is not None and (eval_decoder is not None or length(evaluated) > length(longest)):
        evaluations = [Timed(0, decoding(evaluated, eval_decoder or decoder, drafts=False))]

    rollout = policy.generate([longest], decoder(1), [("probe", 0)], 1).rollout

    @cache
    def viewed(count: int) -> tuple[Answers, Views]:
        rows = torch.zeros(count, dtype=torch.long, device=rollout.ids.device)
        answers = Answers(
            ids=rollout.ids[rows],
            attention_mask=rollout.attention_mask[rows],
            scored=rollout.step_map[rows] != GIVEN,
            addresses=[("probe", i) for i in range(count)],
            steps=rollout.step_map[rows],
            block_size=policy.predictor.block_size,
        )
        return answers, likelihood.views(answers)

    def learn(count: int) -> None:
        answers, views = viewed(count)
        rows, chosen = views.scored.any(2).T.nonzero(as_tuple=True)
        call = Call(chosen[:count], rows[:count])
        weights.lockstep.backward(log_probs(policy.predictor, answers, views, call).sum())

    of_answer = int(viewed(1)[1].scored.any(2).sum())
    rollouts = [Timed(1, decoding(longest, decoder, drafts=drafts)), *evaluations]
    return ProbeCalls(rollout=rollouts, update=[Timed(of_answer, learn)])
