"""Plan of a language model's run: axes, batch geometry and model evaluations. No weights are loaded.

Steps are counted by running the decoder's committer, and views by building those of an answer of full length. Counts that
depend on the answers are upper bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from flowgrpo.data import known, prompts
from flowgrpo.mdlm.config import TextConfig
from flowgrpo.mdlm.decoding.tokens.branching import Branching
from flowgrpo.mdlm.methods import CHOICES
from flowgrpo.mdlm.methods.hints import Inpainting, check_solutions
from flowgrpo.mdlm.methods.likelihoods import likelihood as likelihoods
from flowgrpo.mdlm.methods.likelihoods.answers import Answers
from flowgrpo.mdlm.methods.objectives.objective import TokenRatio
from flowgrpo.mdlm.methods.published import MODELS, PUBLISHED
from flowgrpo.mdlm.methods.solutions import check_every_solution
from flowgrpo.mdlm.models import memory_estimate
from flowgrpo.mdlm.models.load import check_weights
from flowgrpo.mdlm.planning.decoder_steps import (
    DecodingCost,
    count_decoder_steps,
    evaluation_decoder,
    training_decoder,
)
from flowgrpo.mdlm.planning.tree_cost import count_levels, count_rollout, count_shared_views
from flowgrpo.mdlm.rollouts.rollout import scores_engine
from flowgrpo.schema import published
from flowgrpo.schema.readable import counted
from flowgrpo.training.model_files.hub_files import stands_in_for
from flowgrpo.training.planning.memory_estimate import device_words
from flowgrpo.training.planning.memory_phases import with_setting
from flowgrpo.training.prompts import second_stage
from flowgrpo.training.reports.progress import BACKWARD
from flowgrpo.training.scoring import scorer

AXES = tuple(CHOICES)
ANSWERS = 8  # answers whose random views are checked for overlaps


def plan(config: TextConfig) -> dict[str, Any]:
    """Return the plan of a run as `flowgrpo plan --format json` prints it, for one iteration on all processes.

    Model evaluations count rows: a batch of 8 counts 8, a guided one 16. `at_most` marks upper bounds of counts that
    depend on the answers. The plan assumes that no reward fails. Raises InputError if config or files are wrong.
    """
    with here(config) as placed:
        return _plan(placed) | {"config": config.model_dump(mode="json")}


@contextmanager
def here(config: TextConfig) -> Iterator[TextConfig]:
    """Yield the config; if the hub cannot be reached, `model.path` is a folder with the config.json that this package ships.

    Raises InputError if there is no such model.
    """
    path = config.model.path
    look = partial(check_weights, path, config.model.variant, or_configs=True)
    if not stands_in_for(path, known.texts(), "config.json", look):
        yield config
        return
    with known.text_folder(path) as folder:
        yield with_setting(config, "model.path", folder)


def _plan(config: TextConfig) -> dict[str, Any]:
    train, algorithm = config.train, config.algorithm
    train_prompts = prompts.load_split(config.prompts, "train")
    held_out = prompts.load_split(config.prompts, "eval")[: config.eval.prompts]
    columns = [prompt.columns for prompt in train_prompts]
    check_solutions(algorithm.hints, columns)
    check_every_solution(algorithm.objective.solutions, columns)
    rewards, watched = scorer.rewards(config.rewards, config.eval_rewards)
    scorer.check_columns(rewards, train_prompts)
    scorer.check_columns([*rewards, *watched], held_out)
    second_stage.check_rewards(config, rewards)
    decoder = training_decoder(config)
    walk, cost = count_decoder_steps(decoder), predict_cost(config)
    evaluation = count_decoder_steps(evaluation_decoder(config))
    samples = train.groups * train.group_size
    hinted, gains = algorithm.hints.name != "none", algorithm.credit.name == "step_gain"
    asked = samples * (1 + hinted + gains * walk.steps)
    return {
        "preset": algorithm.preset,
        "axes": {axis: getattr(algorithm, axis).name for axis in AXES},
        "published": published.compared(PUBLISHED[algorithm.preset], config.model_dump(mode="json")),
        "geometry": {
            "groups": train.groups,
            "group_size": train.group_size,
            "roots": algorithm.roots(train.group_size),
            "samples": samples,
            "updates": train.updates,
            "split": train.split,
            "passes": train.passes,
            "micro_batch": train.update_rows,
            "rollout_batch": train.rollout_rows,
            "found": list(train.found),
            "length": config.model.length,
            "steps": walk.steps,
            "guidance_branches": walk.branches,
            "views": cost.views,
        },
        "model_evaluations": {"rollout": cost.rollout, "update": cost.update},
        "with_gradient": cost.with_gradient,
        "at_most": {
            "rollout": not cost.rollout_fixed,
            "update": not cost.update_fixed,
            "reward_calls": hinted or gains,  # for failed groups only; once for equal predictions
        },
        "second_stage": _second_stage(config, cost),
        "decoded": samples,
        "reward_calls": asked * len(config.rewards),
        "evaluation": {
            "model_evaluations": len(held_out) * evaluation.evaluations,
            "at_most": not evaluation.fixed,
            "decoded": len(held_out),
        },
        "evaluation_branches": evaluation.branches,
        "memory": memory_estimate.memory_estimate(config),
    }


def _second_stage(config: TextConfig, cost: Cost) -> dict[str, Any]:
    """Return the most that a second stage adds to an iteration; `cost` is that of the first stage."""
    roots, most = config.algorithm.roots(config.train.group_size), second_stage.most_roots(config)
    train = config.train.model_copy(update={"group_size": config.train.group_size * most // roots})
    both = predict_cost(config.model_copy(update={"train": train}))
    return {
        "model_evaluations": {"rollout": both.rollout - cost.rollout, "update": both.update - cost.update},
        "decoded": train.groups * (train.group_size - config.train.group_size),
    }


def config_at_step(config: TextConfig, step: int, rollout: Any) -> TextConfig:
    """Return the config of a run after a step: `config` itself, since training changes no setting of a text run."""
    return config


def table(planned: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the plan as (label, text) lines for the terminal."""
    g, cost, evaluation = planned["geometry"], planned["model_evaluations"], planned["evaluation"]
    rollout, update = (_bounded(cost[part], planned["at_most"][part]) for part in ("rollout", "update"))
    steps = _bounded(g["steps"], planned["at_most"]["rollout"])
    learning = _bounded(planned["with_gradient"], planned["at_most"]["update"])
    evaluations = _bounded(evaluation["model_evaluations"], evaluation["at_most"])
    calls = _bounded(planned["reward_calls"], planned["at_most"]["reward_calls"])
    on_device, host = device_words(planned["memory"]), planned["memory"]["host_bytes"] / 2**30
    return [
        ("preset", planned["preset"]),
        *planned["axes"].items(),
        *published.plan_lines(planned, MODELS),
        (
            "batch",
            f"{counted(g['groups'], 'group')} x {g['group_size']} = {g['samples']:,} answers of "
            f"{counted(g['length'], 'token')}; {_format_steps(g['updates'], g['passes'])}, split by {g['split']}",
        ),
        *[("trees", f"{g['roots']} in a group, of {g['group_size'] // g['roots']} answers")]
        * (g["roots"] < g["group_size"]),
        ("steps", f"{steps}, {counted(g['rollout_batch'], 'answer')} in one call"),
        ("views", f"{_bounded(g['views'], planned['at_most']['update'])} of an answer, {g['micro_batch']} in one call"),
        ("model evaluations", f"each iteration: {rollout} rollout + {update} update ({learning} with a backward pass)"),
        *second_stage.plan_lines(planned["second_stage"]),
        ("decoded", f"{planned['decoded']:,} answers, {calls} rewards"),
        *[("memory", f"{on_device}, {host:.2f} GiB in host memory; --gpu-memory 24 also counts activations")]
        * ("gpu" not in planned),
        ("evaluation", f"each time: {evaluations} model evaluations, {evaluation['decoded']:,} decoded"),
    ]


def format_tree(planned: dict[str, Any]) -> list[str]:
    """Return no lines: an answer has no tree to draw."""
    return []


def _format_steps(updates: int, passes: int) -> str:
    """Return the number of optimizer steps, and of each pass if an iteration has several."""
    steps = counted(updates * passes, "optimizer step")
    return steps if passes == 1 else f"{steps} ({counted(passes, 'pass')} of {updates})"


def _bounded(number: int, at_most: bool) -> str:
    return f"at most {number:,}" if at_most else f"{number:,}"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Rows through the model in one iteration on all processes."""

    rollout: int
    update: int
    with_gradient: int  # rows of the update with a backward pass
    rollout_fixed: bool  # whether `rollout` is exact, not an upper bound
    update_fixed: bool  # the same of `update`
    views: int  # of an answer


def predict_cost(config: TextConfig) -> Cost:
    """Return the cost of an iteration; raise InputError if the axes do not fit each other."""
    train, algorithm, likelihood = config.train, config.algorithm, config.algorithm.likelihood
    decoder = training_decoder(config)
    walk = count_decoder_steps(decoder)
    samples, local = train.groups * train.group_size, config.run.engine is None
    split = algorithm.tree.branching(decoder)
    trees = samples // split.leaves
    # Answers of an engine cost one evaluation of our model per step if they are scored, else none.
    if local:
        of_tree, rollout_fixed = count_rollout(walk, split, train.rollout_rows)
        rollout = trees * of_tree
    else:
        rollout = samples * scores_engine(config, decoder) * walk.steps
        rollout_fixed = rollout == 0
    if algorithm.objective.solutions is not None:
        rollout, rollout_fixed = 0, True
    trained, all_trained = _trained_answers(config)
    views, slopes, views_fixed = _views(config, walk, split)
    own = algorithm.objective.solutions is None
    behind = config.run.staleness > 0  # the first iterations are not
    moves = train.passes * train.updates > 1 or algorithm.needs_old or behind
    measure = algorithm.measure
    old = own and ((moves and not likelihood.recorded(decoder)) or measure in ("entropy", "gated_distances"))
    once_more = measure in ("group_spread", "gated_distances")
    reference = algorithm.objective.kl.reference is not None
    mask_draws = 1 if likelihood.fixed else train.passes
    of_answers = trained * views
    if algorithm.trains_branches_once:
        shared = count_shared_views(walk, split, likelihood)
        of_answers = samples * views if shared is None else min(samples * views, trees * shared)
        views_fixed = views_fixed and shared is not None and split.entropy is None
    learning = of_answers * train.passes
    update = learning * slopes + of_answers * mask_draws * (old + reference + once_more)
    if getattr(algorithm.objective, "balance", None) is not None and moves:
        update += learning  # the ratios of each optimizer step
    update_fixed = views_fixed and all_trained and not behind
    # With hints every answer may be sampled a second time, and the entropy of given tokens costs one evaluation each.
    if isinstance(algorithm.hints, Inpainting):
        rollout, rollout_fixed = 2 * rollout, False
        update, update_fixed = update + train.groups * int(algorithm.hints.replace * train.group_size), False
    return Cost(
        rollout=rollout,
        update=update,
        with_gradient=learning,
        rollout_fixed=rollout_fixed,
        update_fixed=update_fixed,
        views=views,
    )


def forwards(config: TextConfig) -> int:
    """Return the cost of an iteration in forward passes; an evaluation in the update counts as `BACKWARD` of them."""
    cost = predict_cost(config)
    return cost.rollout + BACKWARD * cost.update


def _trained_answers(config: TextConfig) -> tuple[int, bool]:
    """Return the number of trained answers of an iteration, at most, and whether it is exact.

    If the tokens of an answer are compared apart, a selection of units may leave tokens in every answer.
    """
    train, select = config.train, config.train.select
    samples = train.groups * train.group_size
    exact = config.algorithm.baseline.drops is None
    if select is None:
        return samples, exact
    if (
        config.algorithm.credit.by_token or config.prompts.pick.budget != "equal"
    ):  # groups of unequal size round unequally
        return samples, False
    fraction, exact = max(select.fraction, select.end or 0.0), exact and select.end in (None, select.fraction)
    if select.across == "batch":
        return min(samples, max(2, round(fraction * samples))), exact
    return train.groups * min(train.group_size, max(2, round(fraction * train.group_size))), exact


def _views(config: TextConfig, walk: DecodingCost, split: Branching) -> tuple[int, int, bool]:
    """Return the number of views of an answer, evaluations of a view for its gradient (1 or 2), and if both are exact."""
    likelihood, objective, length = config.algorithm.likelihood, config.algorithm.objective, config.model.length
    in_order = likelihood.name in ("autoregressive", "trajectory")  # many views, none random
    if likelihood.by_branch:
        levels, exact = count_levels(walk, split)
        walk = replace(walk, commits=levels, fixed=exact)
    views = likelihood.views(_answers(1 if in_order else ANSWERS, length, walk))
    count, separable = len(views.weight), objective.separable(views)
    together = config.train.part_rows // config.run.shards if objective.couples else 1  # answers of a backward pass
    several = count * together > config.train.update_rows
    # Otherwise random views may be disjoint by chance, which makes a token ratio separable.
    exact = not several or separable or in_order or not isinstance(objective, TokenRatio)
    return count, 2 if several and not separable else 1, exact and _same_for_all(likelihood, walk, length)


def _answers(count: int, length: int, walk: DecodingCost) -> Answers:
    """Return answers of full length without prompts, committed in `walk.commits` steps (of each block, if block-causal)."""
    ids = torch.zeros(count, length, dtype=torch.long)
    steps = (torch.arange(length) % (walk.block_size or length)).clamp(max=walk.commits - 1).expand(count, -1)
    every = torch.ones(count, length, dtype=torch.bool)
    return Answers(
        ids=ids,
        attention_mask=every,
        scored=every,
        addresses=[("plan", i) for i in range(count)],
        steps=steps,
        block_size=walk.block_size,
    )


def _same_for_all(likelihood: likelihoods.Likelihood, walk: DecodingCost, length: int) -> bool:
    """Return whether every answer has the same number of views, whatever its length, decoding and masks."""
    whole = likelihood.scope == "canvas"
    full = walk.block_size is None or length >= 2 * walk.block_size - 1  # at least one full block for any prompt
    match likelihood:
        case likelihoods.Autoregressive():
            return whole and full
        case likelihoods.Trajectory():
            return whole and full and walk.fixed
        case likelihoods.Coupled():
            return whole and likelihood.weights == "unbiased" and length > 1
        case likelihoods.MonteCarlo():
            return likelihood.masks == "exact_k" and not likelihood.antithetic
        case likelihoods.Quadrature():
            return likelihood.masks != "bernoulli"
    return True
