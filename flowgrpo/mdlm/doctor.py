"""Checks of a language model's run for the most common faults, on a few sampled answers (`flowgrpo doctor`)."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from flowgrpo.data import prompts
from flowgrpo.data.prompts import Prompt, Row
from flowgrpo.mdlm.config import DIGITS, TextConfig
from flowgrpo.mdlm.decoding.decode import Decoder, Rollout
from flowgrpo.mdlm.methods.backward import backward
from flowgrpo.mdlm.methods.likelihoods.answers import Answers, in_scope
from flowgrpo.mdlm.methods.likelihoods.estimate import estimate
from flowgrpo.mdlm.methods.likelihoods.likelihood import trajectory
from flowgrpo.mdlm.models import memory_estimate
from flowgrpo.mdlm.models.load import load_adapter
from flowgrpo.mdlm.outputs.export import write_weights
from flowgrpo.mdlm.planning import memory_budget
from flowgrpo.mdlm.planning.decoder_steps import training_decoder
from flowgrpo.mdlm.planning.plan import plan
from flowgrpo.mdlm.policy import TextPolicy
from flowgrpo.mdlm.setup import check as check_rewards
from flowgrpo.mdlm.setup import load_text_policy, policy_and_weights
from flowgrpo.training.reports.doctor_checks import Check, memory_left, reloaded, spread, warnings_heard
from flowgrpo.training.run.phases import phase
from flowgrpo.training.run.run_data import RunData
from flowgrpo.training.scoring import scorer
from flowgrpo.training.scoring.scorer import score
from flowgrpo.training.weights.trained_weights import Weights
from rewards import Reward
from rewards.compute import default_device
from samplers.batches import batched

SIZE = 4  # answers of a group
GROUPS = 8  # groups sampled at most; more than the first two only while some reward is constant within each
LENGTH = 64  # tokens of an answer, without a config
REMEDY = (
    "lower train.micro_batch and train.rollout_batch, set model.gradient_checkpointing, or train a LoRA (model.lora)"
)
DRIFT = {"float32": 1e-3, "bfloat16": 0.3}  # how much a token's log-probability may change with the batch


def length(texts: Sequence[str], prompts: Sequence[str]) -> list[float]:
    """Return the number of characters of each text: the reward when `doctor` gets a model without a config."""
    return [float(len(text)) for text in texts]


def defaults(model: str) -> dict[str, Any]:
    """Return a default config, as a map of keys, for a model: a built-in name, a local folder or a hub id."""
    if model == DIGITS:
        return {"kind": "mdlm", "model": {"path": model}}
    return {
        "kind": "mdlm",
        "model": {"path": model, "length": LENGTH},
        "rewards": [{"use": f"{__name__}:length"}],
    }


def examine(settings: TextConfig) -> Iterator[Check]:
    """Yield the checks of a config as they finish; raise InputError or RewardError first if the config is wrong."""
    plan(settings)
    train_prompts = sorted(prompts.load_split(settings.prompts, "train"), key=lambda prompt: -len(prompt.text))
    chosen = [train_prompts[0], train_prompts[-1]]  # the longest and the shortest prompt, one group each
    further = [train_prompts[place * (len(train_prompts) - 1) // (GROUPS - 1)] for place in range(1, GROUPS - 1)]
    rewards, _ = scorer.rewards(settings.rewards)
    unmatched = [reward for reward in rewards if not any(reward.applies(prompt.columns) for prompt in chosen)]
    further = [*(prompt for _, prompt in scorer.pair_with_prompts(unmatched, train_prompts)), *further]
    check_rewards(settings, RunData(train_prompts, chosen, rewards))
    device = default_device()
    memory_estimate.check(settings, device)
    with phase("loading"):
        policy, weights = policy_and_weights(settings, device)
    rows = [Row(prompt.text, i, prompt.columns) for prompt in chosen for i in range(SIZE)]
    decoder = training_decoder(settings, policy.eos_id, len(rows), policy.predictor)
    seeds = [("doctor", settings.run.seed, place) for place in range(len(rows))]
    completions = policy.generate([row.prompt for row in rows], decoder, seeds, settings.train.rollout_rows)
    rollout = completions.rollout
    answers = Answers(
        ids=rollout.ids,
        attention_mask=rollout.attention_mask,
        scored=in_scope(rollout.completion, policy.eos_id, settings.algorithm.likelihood.scope),
        addresses=seeds,
        steps=rollout.step_map,
        block_size=policy.predictor.block_size,
    )
    yield _drift(settings, policy, decoder=decoder, rollout=rollout, answers=answers)
    yield _gradients(settings, policy, weights, answers)
    groups = zip(batched(completions.texts, SIZE), batched(rows, SIZE), strict=True)
    with warnings_heard() as warned:
        values = [score(rewards, texts, group_rows).values for texts, group_rows in groups]
        check = _spread(settings, policy, rewards, values=values, others=further, warned=warned)
    yield check
    yield memory_left(device, REMEDY, lambda room: memory_budget.fit(settings, room))
    yield _reload(settings, policy, weights, answers)


def _drift(settings: TextConfig, policy: TextPolicy, *, decoder: Decoder, rollout: Rollout, answers: Answers) -> Check:
    """Check that log-probabilities do not depend on the batch, and equal those that the decoder recorded."""
    likelihood, bound = settings.algorithm.likelihood, DRIFT[settings.model.dtype]
    views = likelihood.views(answers)
    size = settings.train.update_rows
    whole = estimate(policy.predictor, answers, views, size).each
    largest = float((whole - estimate(policy.predictor, answers, views, size // 2 or 2).each).abs().max())
    value = f"{largest:.1e} between batches of two sizes"
    if likelihood.name == "trajectory" and decoder.recorded:
        each = estimate(policy.predictor, answers, trajectory(answers), size).each.sum(0)
        gap = float((each - rollout.commit_logp.to(each))[answers.scored].abs().max())
        largest, value = max(largest, gap), f"{value}, {gap:.1e} from what the decoder recorded"
    ok = largest <= bound
    advice = (
        "a token's log-probability changes with its batch, so that ratios are wrong: the model may not ignore padding, or "
        "may be in training mode; try prompts of one length, or model.dtype=float32"
    )
    return Check("drift", ok, f"{value}, the limit is {bound:g}", "" if ok else advice)


def _spread(
    settings: TextConfig,
    policy: TextPolicy,
    rewards: Sequence[Reward],
    *,
    values: list[torch.Tensor],
    others: Sequence[Prompt],
    warned: Sequence[str],
) -> Check:
    """Check that every reward varies within a group; sample groups of further prompts until each does."""
    decoder = training_decoder(settings, policy.eos_id, SIZE, policy.predictor)
    for place, prompt in enumerate(others, start=len(values)):
        if not spread(rewards, values).advice:
            break
        rows = [Row(prompt.text, i, prompt.columns) for i in range(SIZE)]
        seeds = [("doctor", settings.run.seed, SIZE * place + i) for i in range(SIZE)]
        completions = policy.generate([prompt.text] * SIZE, decoder, seeds, settings.train.rollout_rows)
        values.append(score(rewards, completions.texts, rows).values)
    return spread(rewards, values, warned)


def _gradients(settings: TextConfig, policy: TextPolicy, weights: Weights, answers: Answers) -> Check:
    """Check that the gradient is finite, not 0, and reaches all adapters (in full training: at least some weights)."""
    algorithm, size = settings.algorithm, settings.train.update_rows
    views = algorithm.likelihood.views(answers)
    old = estimate(policy.predictor, answers, views, size, separable=algorithm.objective.separable(views)).each
    advantage = torch.ones(len(answers.ids), device=answers.ids.device)
    advantage[1::2] = -1
    weight = algorithm.aggregation.weights(answers.scored, advantage, views.first, lambda total: total)
    backward(
        policy.predictor,
        answers,
        views,
        objective=algorithm.objective,
        advantage=advantage,
        group=torch.zeros(len(advantage), dtype=torch.long, device=advantage.device),
        rank=torch.zeros_like(advantage),
        token_weight=weight,
        old=old,
        reference=old,
        micro_batch=size,
        chosen=torch.zeros_like(answers.scored),
    )
    extra = {id(p) for module in weights.extra_modules.values() for p in module.parameters()}
    trainable = [p for p in weights.parameters if id(p) not in extra]
    norms = [float(p.grad.norm()) for p in trainable if p.grad is not None]
    for p in trainable:
        p.grad = None
    total = math.hypot(*norms)
    reached = len(norms) == len(trainable) or (bool(norms) and weights.lora is None)
    ok = reached and math.isfinite(total) and total > 0
    advice = (
        "gradients are not finite: try model.dtype=float32"
        if norms and not math.isfinite(total)
        else "no gradient reaches some trained weights: are model.lora.targets layers that the forward pass uses?"
    )
    return Check(
        "gradients", ok, f"norm {total:.1e} over {len(norms)} of {len(trainable)} tensors", "" if ok else advice
    )


@torch.no_grad()
def _reload(settings: TextConfig, policy: TextPolicy, weights: Weights, answers: Answers) -> Check:
    """Check that changed weights give the same logits after an export and a load into a fresh model."""
    model, network = settings.model, policy.predictor.model
    dtype = str(next(network.parameters()).dtype).removeprefix("torch.")
    before = policy.predictor.logits(answers.ids, answers.attention_mask)
    generator = torch.Generator().manual_seed(0)
    for p in weights.parameters:
        p.add_(0.02 * torch.randn(p.shape, generator=generator).to(p))
    changed = policy.predictor.logits(answers.ids, answers.attention_mask)
    with tempfile.TemporaryDirectory() as folder:
        write_weights(model, policy, weights, Path(folder))
        network.to("cpu")  # the device may not hold two models
        source = folder if weights.lora is None else model.path
        variant = None if weights.lora is None else model.variant
        saved = model.model_copy(update={"path": str(source), "dtype": dtype, "variant": variant})
        fresh = load_text_policy(saved, policy.device).predictor
        if weights.lora is not None:
            load_adapter(fresh, Path(folder))
        again = fresh.logits(answers.ids, answers.attention_mask)
    known = torch.isfinite(changed)  # all but the mask token, whose logit is -inf
    gap, moved = (float((other - changed)[known].abs().max()) for other in (again, before))
    advice = "the exported weights do not reproduce the trained model; please report this class"
    return reloaded(gap, moved, "logits", advice)
