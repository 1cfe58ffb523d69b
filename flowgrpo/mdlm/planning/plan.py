"""What a run of a language model will do and cost, before it does it. Loads no weights.

A decoder's steps are counted with its own committer, and the views of a likelihood are made of an answer of full length, so
that a change of either shows here. Where the numbers depend on the answers these are the most.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from flowgrpo.data import known, prompts
from flowgrpo.mdlm.config import TextConfig
from flowgrpo.mdlm.decoding.decode import Decoder
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from flowgrpo.mdlm.decoding.rules.commit_rules import Ascending, Committer, Even, Remaining
from flowgrpo.mdlm.decoding.tokens.step import DecodeStep
from flowgrpo.mdlm.methods.hints import Inpainting, check_solutions
from flowgrpo.mdlm.methods.likelihoods import likelihood as likelihoods
from flowgrpo.mdlm.methods.likelihoods.answers import Answers
from flowgrpo.mdlm.methods.objectives.objective import Objective, TokenRatio
from flowgrpo.mdlm.methods.presets import PUBLISHED
from flowgrpo.mdlm.methods.schedules.learned_schedule import Chosen, scheduled
from flowgrpo.mdlm.models import memory_estimate
from flowgrpo.mdlm.models.load import block_size_of, check_weights
from flowgrpo.mdlm.rollouts.rollout import scores_engine
from flowgrpo.schema import published
from flowgrpo.training.model_files.hub_files import stands_in_for
from flowgrpo.training.planning.memory_budget import switched
from flowgrpo.training.reports.progress import BACKWARD
from flowgrpo.training.scoring import scorer

AXES = ("decoder", "schedule", "hints", "likelihood", "baseline", "objective", "aggregation")
NO_END = -1  # stands for the end token, which no answer of full length has
ANSWERS = 8  # whose random views tell whether any two overlap


def plan(config: TextConfig) -> dict[str, Any]:
    """The plan of a run, as `flowgrpo plan --format json` prints it; counts are of one iteration on all processes.

    Model evaluations count rows: a batch of 8 is 8, and a guided one 16. `at_most` says which of them depend on the answers
    and may be less. All rewards are taken to be numbers: lost answers are not trained on.

    Of a model at the hub that cannot be reached, what is known here stands in (`data.known`).

    Raises:
        InputError: the model, its files, the prompts or the axes are wrong.
    """
    with here(config) as placed:
        return _plan(placed) | {"config": config.model_dump(mode="json")}


@contextmanager
def here(config: TextConfig) -> Iterator[TextConfig]:
    """The config, with a folder of the configs that are known here in the place of a model whom the hub does not give.

    Raises:
        InputError: there is no such model, and it is not known here.
    """
    path = config.model.path
    look = partial(check_weights, path, config.model.variant, or_configs=True)
    if not stands_in_for(path, known.texts(), "config.json", look):
        yield config
        return
    with known.text_folder(path) as folder:
        yield switched(config, "model.path", folder)


def _plan(config: TextConfig) -> dict[str, Any]:
    train, algorithm = config.train, config.algorithm
    check_solutions(algorithm.hints, [prompt.columns for prompt in prompts.load_split(config.prompts, "train")])
    scorer.rewards(config.rewards, config.eval_rewards)
    decoder = training_decoder(config)
    walk, cost = walked(decoder), predicted(config)
    held_out = min(config.eval.prompts, len(prompts.load_split(config.prompts, "eval")))
    evaluation = walked(evaluation_decoder(config))
    samples = train.groups * train.group_size
    asked = samples if algorithm.hints.name == "none" else 2 * samples
    return {
        "preset": algorithm.preset,
        "axes": {axis: getattr(algorithm, axis).name for axis in AXES},
        "published": published.compared(PUBLISHED[algorithm.preset], config.model_dump(mode="json")),
        "geometry": {
            "groups": train.groups,
            "group_size": train.group_size,
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
        "at_most": {"rollout": not cost.rollout_fixed, "update": not cost.update_fixed},
        "decoded": samples,
        "reward_calls": asked * len(config.rewards),
        "evaluation": {
            "model_evaluations": held_out * evaluation.evaluations,
            "at_most": not evaluation.fixed,
            "decoded": held_out,
        },
        "evaluation_branches": evaluation.branches,
        "memory": memory_estimate.memory_estimate(config),
    }


def reached(config: TextConfig, step: int, rollout: Any) -> TextConfig:
    """The configuration of a run as it stands after a step, which for texts is as it began."""
    return config


def table(planned: dict[str, Any]) -> list[tuple[str, str]]:
    """The plan's lines for people: labels and words."""
    g, cost, evaluation = planned["geometry"], planned["model_evaluations"], planned["evaluation"]
    rollout, update = (_bounded(cost[part], planned["at_most"][part]) for part in ("rollout", "update"))
    gpu, host = (planned["memory"][key] / 2**30 for key in ("gpu_bytes", "host_bytes"))
    return [
        ("preset", planned["preset"]),
        *planned["axes"].items(),
        *[("published", published.line(planned["published"]))] * bool(planned["published"]),
        (
            "batch",
            f"{g['groups']} groups x {g['group_size']} = {g['samples']} answers of {g['length']} tokens, "
            f"{g['updates']} updates, {g['passes']} passes, split by {g['split']}",
        ),
        ("steps", f"{_bounded(g['steps'], planned['at_most']['rollout'])}, {g['rollout_batch']} answers in one call"),
        ("views", f"{_bounded(g['views'], planned['at_most']['update'])} of an answer, {g['micro_batch']} in one call"),
        ("model evaluations", f"{rollout} rollout + {update} update, each iteration"),
        ("decoded", f"{planned['decoded']}, {planned['reward_calls']} reward calls"),
        (
            "memory",
            f"{gpu:.2f} GiB on the device, {host:.2f} beside it, and activations, which --gpu-memory 24 counts",
        ),
        (
            "evaluation",
            f"{_bounded(evaluation['model_evaluations'], evaluation['at_most'])} model evaluations, "
            f"{evaluation['decoded']} decoded, each time",
        ),
    ]


def drawn(planned: dict[str, Any]) -> list[str]:
    """Nothing: an answer has no tree to draw."""
    return []


def _bounded(number: int, at_most: bool) -> str:
    return f"at most {number:,}" if at_most else f"{number:,}"


@dataclass(frozen=True, kw_only=True)
class DecodingCost:
    """What one answer takes.

    Attributes:
        steps: of the decoder.
        commits: those of them that commit something; in a block-causal model the most in one of its blocks.
        branches: evaluations of a step.
        fixed: whether it is always so.
        block_size: of a block-causal model.
    """

    steps: int
    commits: int
    branches: int
    fixed: bool
    block_size: int | None = None

    @property
    def evaluations(self) -> int:
        """Model evaluations of the answer."""
        return self.steps * self.branches


def block_size(config: TextConfig) -> int | None:
    """Tokens of a block of the model, from its config; None if its attention is full."""
    return block_size_of(config.model.path, config.model.attention, config.model.block_size)


def training_decoder(
    config: TextConfig, eos_id: int = NO_END, count: int = 1, predictor: MaskPredictor | None = None
) -> Decoder:
    """The decoder of training, of `count` answers, with the middle of a learned schedule for its numbers.

    Raises:
        InputError: the schedule has a number that the decoder has not, or the model does not fit the decoder.
    """
    length, algorithm = config.model.length, config.algorithm
    size = block_size(config) if predictor is None else None
    decoder = algorithm.decoder.build(length, eos_id, "algorithm.decoder", predictor=predictor, block_size=size)
    schedule = algorithm.schedule.policy(length)
    return decoder if schedule is None else scheduled(decoder, schedule.typical(count))


def evaluation_decoder(config: TextConfig) -> Decoder:
    """The decoder of evaluation, likewise."""
    length = config.model.length
    decoder = config.eval.decoder.build(length, NO_END, "eval.decoder", block_size=block_size(config))
    schedule = config.algorithm.schedule.policy(length)
    learned = config.eval.decoder.name == "scheduled"
    return scheduled(decoder, schedule.typical(1)) if schedule is not None and learned else decoder


def walked(decoder: Decoder) -> DecodingCost:
    """The steps of an answer of full length, exact where no score decides how many positions a step commits.

    In a block-causal model they may depend on where the prompt ends in its block: the most, and exact where they do not.
    """
    committer, region = decoder.committer, decoder.region
    narrow = region.window is not None and any(end - start > region.window for start, end in region.blocks)
    counted = isinstance(committer, Even | Ascending) or (
        isinstance(committer, Remaining) and not isinstance(committer.ratio, Chosen)
    )
    counted, branches = counted and not narrow, 2 if decoder.guided else 1
    fixed = counted and decoder.stop_id is None
    if region.counted is None:
        parts = [
            _counted(decoder, block, end - start) if counted else _most(decoder, end - start, narrow)
            for block, (start, end) in enumerate(region.blocks)
        ]
        steps, commits = (sum(part) for part in zip(*parts, strict=True))
        return DecodingCost(steps=steps, commits=commits, branches=branches, fixed=fixed)
    part = [
        _counted(decoder, 0, size) if counted else _most(decoder, size, narrow) for size in range(region.counted + 1)
    ]
    borders = [torch.stack(each) for each in region.parts(torch.arange(region.counted))]
    ends = torch.stack(borders)  # (parts, 2, offsets)
    steps = [sum(part[size][0] for size in sizes) for sizes in (ends[:, 1] - ends[:, 0]).T.tolist()]
    commits = part[region.counted][1] * ((region.block_size or region.counted) // region.counted)
    return DecodingCost(
        steps=max(steps),
        commits=commits,
        branches=branches,
        fixed=fixed and min(steps) == max(steps),
        block_size=region.block_size,
    )


def _counted(decoder: Decoder, block: int, size: int) -> tuple[int, int]:
    """Steps and commits of a block of so many tokens, by the committer on scores that are all alike."""
    masked, steps, commits = torch.ones(1, size, dtype=torch.bool), 0, 0
    row, ids = torch.zeros(1, dtype=torch.long), torch.zeros(1, decoder.region.length, dtype=torch.long)
    shared = torch.tensor([decoder.region.counted or size])
    while masked.any():
        index = torch.tensor([steps])
        step = DecodeStep(
            frame=decoder.frame,
            row=row,
            index=index,
            in_block=steps,
            block_masks=shared,
            block=block,
            start=0,
            open=masked,
            ids=ids,
            attention_mask=ids.bool(),
            prompt=0,
        )
        chosen = masked & decoder.committer(step, torch.zeros(masked.shape).masked_fill(~masked, -torch.inf))
        masked = masked & ~chosen
        steps, commits = steps + 1, commits + int(chosen.any())
    return steps, commits


def _most(decoder: Decoder, size: int, narrow: bool) -> tuple[int, int]:
    """The most steps and commits of a block: one position a step, unless the committer ends after a number of steps."""
    committer = decoder.committer
    assert isinstance(committer, Committer), "one that counts no steps is of no table"
    own = committer.block_steps(decoder.frame)
    steps = 0 if size == 0 else size if own is None else size + own if narrow else own
    return steps, min(steps, size)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Rows through the model in one iteration on all processes, whether they are that many for sure; views of an answer.

    `with_gradient` are the rows of the update that a backward pass follows.
    """

    rollout: int
    update: int
    with_gradient: int
    rollout_fixed: bool
    update_fixed: bool
    views: int


def predicted(config: TextConfig) -> Cost:
    """The cost of an iteration.

    Raises:
        InputError: the axes do not fit each other.
    """
    train, algorithm = config.train, config.algorithm
    decoder = training_decoder(config)
    walk = walked(decoder)
    samples = train.groups * train.group_size
    own = config.run.engine is None  # what an engine wrote is scored at each of its steps, if at all
    rollout = samples * (walk.evaluations if own else scores_engine(config, decoder) * walk.steps)
    trained, all_trained = _trained(config)
    likelihood = algorithm.likelihood
    objective, kl = algorithm.objective, algorithm.objective.kl
    views, slopes, views_fixed = _views(
        likelihood, objective, walk=walk, length=config.model.length, micro_batch=train.update_rows
    )
    old = train.passes * train.updates > 1 and not likelihood.recorded(decoder)
    reference = kl.reference is not None
    mask_draws = 1 if likelihood.fixed else train.passes
    learning = trained * views * train.passes
    update = learning * slopes + trained * views * mask_draws * (old + reference)
    if isinstance(algorithm.hints, Inpainting):  # each answer once more, and its given tokens are judged
        given = train.groups * int(algorithm.hints.replace * train.group_size)
        rollout, update, fixed = 2 * rollout, update + given, (False, False)
    else:
        fixed = walk.fixed if own else rollout == 0, views_fixed and all_trained
    return Cost(
        rollout=rollout,
        update=update,
        with_gradient=learning,
        rollout_fixed=fixed[0],
        update_fixed=fixed[1],
        views=views,
    )


def forwards(config: TextConfig) -> int:
    """Model evaluations of an iteration, counted in forward passes: one with its backward pass is about 3."""
    cost = predicted(config)
    return cost.rollout + BACKWARD * cost.update


def _trained(config: TextConfig) -> tuple[int, bool]:
    """How many answers of an iteration are trained on, and whether that is sure."""
    train, select = config.train, config.train.select
    samples = train.groups * train.group_size
    sure = config.algorithm.baseline.drops is None
    if select is None:
        return samples, sure
    if config.prompts.pick.budget == "knapsack":  # groups of unequal size round unequally
        return samples, False
    return train.groups * min(train.group_size, max(2, round(select.fraction * train.group_size))), sure


def _views(
    likelihood: likelihoods.Likelihood, objective: Objective, *, walk: DecodingCost, length: int, micro_batch: int
) -> tuple[int, int, bool]:
    """Views of an answer, evaluations of each for the gradient (see `methods.backward`), and whether that is sure."""
    in_order = likelihood.name in ("autoregressive", "trajectory")  # no chance, and many views
    views = likelihood.views(_answers(1 if in_order else ANSWERS, length, walk))
    count, separable = len(views.weight), objective.separable(views)
    several = count > micro_batch
    sure = not several or separable or in_order or not isinstance(objective, TokenRatio)  # else disjoint by chance
    return count, 2 if several and not separable else 1, sure and _same_for_all(likelihood, walk, length)


def _answers(count: int, length: int, walk: DecodingCost) -> Answers:
    """Answers of full length without prompts, whose tokens were committed in so many steps, of each block by itself."""
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
    """Whether every answer has as many views, whatever its length, its decoding and the masks that are drawn."""
    whole = likelihood.scope == "canvas"
    full = walk.block_size is None or length >= 2 * walk.block_size - 1  # some block is, wherever the prompt ends
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
