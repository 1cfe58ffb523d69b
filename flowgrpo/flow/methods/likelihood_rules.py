"""Checks of a config, before anything is loaded: settings that do not go with `likelihood: elbo` or the objective."""

from __future__ import annotations

from typing import Any

from flowgrpo.errors import InputError

CHAINS = ("chain", "window")
SPLITTING = ("branch", "branch_window", "brush")


def check(algorithm: Any) -> None:
    """Raise InputError if a choice of `algorithm` has no meaning or no effect with likelihood elbo."""
    tree, objective, likelihood = algorithm.tree, algorithm.objective, algorithm.likelihood
    if tree.name not in (*CHAINS, *SPLITTING):
        raise InputError(
            f"algorithm.tree: elbo trains on the ends of chains and of trees that split, {tree.name} has others; take "
            "chain, branch_window or brush"
        )
    if objective.name == "contrast" and objective.penalty and likelihood.sampler != likelihood.anchor:
        raise InputError(
            f"algorithm.objective.penalty: samples of the {likelihood.sampler} policy do not tell its divergence from the "
            f"{likelihood.anchor} one; take the same sampler and anchor, or 0"
        )
    if tree.name in SPLITTING:
        _check_splitting(algorithm)
    elif not likelihood.bridge:
        raise InputError(f"algorithm.likelihood.bridge: {tree.name} does not split; leave it out")
    elif algorithm.credit.name != "terminal":
        raise InputError(
            f"algorithm.credit: elbo trains on final samples, {algorithm.credit.name} gives steps their own; take terminal"
        )
    if tree.start == "shared" and algorithm.kernel.name == "ode":
        raise InputError(
            "algorithm.tree.start: shared gives a group one start, and ode adds no noise, so that its samples are equal; "
            "take independent"
        )
    if algorithm.kernel.solver != "euler" and algorithm.kernel.name != "ode" and _noisy_throughout(tree):
        raise InputError(
            f"algorithm.kernel.solver: the steps of {tree.name} have noise, and {algorithm.kernel.solver} takes those "
            "without; take euler"
        )
    if algorithm.kernel.calibrate is not None:
        raise InputError(
            "algorithm.kernel.calibrate: it counts the gains of steps, which elbo does not train; take null"
        )
    if objective.step_weights != "none":
        raise InputError(
            f"algorithm.objective.step_weights: {objective.step_weights} weighs a kernel's steps; elbo has "
            "algorithm.likelihood.weight, take none"
        )
    if objective.kl.form != "velocity" and (objective.kl.beta or objective.kl.previous):
        raise InputError(
            f"algorithm.objective.kl.form: {objective.kl.form} is of a kernel's noise; by elbo there is velocity, take that"
        )
    if algorithm.kernel.name == "ode" and (tree.name == "window" or tree.steps is not None or tree.train_fraction < 1):
        raise InputError(
            "algorithm.tree: which steps are stochastic says nothing of ode, which has none; take chain alone"
        )
    if likelihood.anchor == "live" and (objective.couples != "nothing" or hasattr(objective, "clip_range")):
        raise InputError(
            f"algorithm.likelihood.anchor: the ratio to the live policy is 1, so {objective.name} learns nothing; take "
            "old, bank or reference"
        )
    if likelihood.bank != type(likelihood).model_fields["bank"].default and algorithm.bank is None:
        raise InputError(
            "algorithm.likelihood.bank: nobody asks for a snapshot; take algorithm.likelihood.sampler=bank, or leave it out"
        )
    if likelihood.weight != "power" and likelihood.power != type(likelihood).model_fields["power"].default:
        raise InputError(f"algorithm.likelihood.power: the weight {likelihood.weight} has no power; take weight=power")
    if objective.couples == "group" and likelihood.noise != "group":
        raise InputError(
            f"algorithm.likelihood.noise: {objective.name} compares samples at one noise level with one noise; take group"
        )


def _noisy_throughout(tree: Any) -> bool:
    return tree.name == "branch" or (tree.name == "chain" and tree.steps is None)


def _check_splitting(algorithm: Any) -> None:
    """Raise InputError if a choice does not go with final samples of trees that split."""
    tree, credit = algorithm.tree, algorithm.credit
    if credit.name != "depthwise" and not (credit.name == "nested" and credit.starts):
        given = "without starts" if credit.name == "nested" else "for trees that split"
        raise InputError(
            f"algorithm.credit: elbo trains at all noise levels of a sample, {credit.name} {given} leaves some out; "
            "take nested with starts=true, or depthwise"
        )
    if algorithm.kernel.name == "ode":
        raise InputError("algorithm.kernel: ode adds no noise where a tree splits; take flow_sde")
    if tree.name == "brush":
        if tree.finish is not None:
            raise InputError("algorithm.tree.finish: elbo trains on what a finish makes, so it is exact; take null")
    else:
        if tree.siblings != "own":
            raise InputError(
                f"algorithm.tree.siblings: {tree.siblings} noise is for the ratios of steps; take own by elbo"
            )
        if tree.prune is not None:
            raise InputError("algorithm.tree.prune: elbo trains on samples, not on edges; take null")
    if algorithm.objective.couples == "group":
        raise InputError(f"algorithm.tree: {algorithm.objective.name} compares whole samples of a group; take chain")


def check_policy(config: Any, policy: Any) -> None:
    """Raise InputError if likelihood elbo meets a pipeline that overwrites a part of its states (masked editing)."""
    if config.algorithm.likelihood.name == "elbo" and policy.pins:
        raise InputError(
            "algorithm.likelihood: the pipeline puts parts of its own in place of what steps move to (a picture's, outside "
            "a mask), which final samples cannot tell from what the model made; take trajectory"
        )


def check_run(config: Any) -> None:
    """Raise InputError if a setting of the run or of training does not go with likelihood elbo."""
    run, train, algorithm = config.run, config.train, config.algorithm
    tree, (first, _) = algorithm.tree, algorithm.likelihood.steps or (0, None)
    split = tree.first_split if tree.name in SPLITTING else 0
    if split > first and tree.roots(train.group_size) == 1:
        raise InputError(
            f"algorithm.tree: a group is one tree, and above step {split} nothing is compared with it; split at step "
            f"{first}, or take train.group_size={2 * train.group_size}"
        )
    if split > first and tree.start == "shared" and tree.name != "branch":
        raise InputError(
            f"algorithm.tree.start: all trees of a group share the ODE steps above step {split}, and draws there learn "
            f"nothing; take independent, or split at step {first}"
        )
    if train.split == "edges":
        raise InputError("train.split: elbo trains on samples, which edges would tear apart; take groups or samples")
    if algorithm.objective.couples == "group" and train.split != "groups" and train.updates > 1:
        raise InputError(
            f"train.split: {algorithm.objective.name} compares the samples of a group in one optimizer step; take groups"
        )
    if run.engine is not None:
        raise InputError(
            "run.engine: an engine's trajectories are scored step by step; take algorithm.likelihood=trajectory"
        )
    if run.staleness or run.generators:
        raise InputError(
            "run.staleness: a method of final samples takes its older policy from algorithm.likelihood.old; take 0, and no "
            "run.generators"
        )
    if algorithm.bank is not None and algorithm.bank.every < train.updates:
        raise InputError(
            f"algorithm.likelihood.bank.every: a snapshot is taken where an iteration ends, which has {train.updates} "
            f"optimizer steps; take {train.updates} or more, or fewer train.updates"
        )
    if run.sharding != "none" and config.model.lora is None and (algorithm.old or algorithm.bank):
        raise InputError(
            "run.sharding: of a network that is trained whole in shards no old policy or snapshot is kept; take "
            "model.lora={}, or an algorithm that asks for none by likelihood.sampler, likelihood.anchor, "
            "objective.clip_range or kl.previous"
        )


def check_steps(algorithm: Any) -> None:
    """Raise InputError if the steps of the kernel are not single ones with a log-probability, as `trajectory` needs."""
    if algorithm.kernel.name == "ode":
        raise InputError(
            "algorithm.kernel: steps of ode have no log-probability; take algorithm.likelihood=elbo, or a kernel with "
            "noise, flow_sde say"
        )
    if algorithm.kernel.solver != "euler":
        raise InputError(
            f"algorithm.kernel.solver: {algorithm.kernel.solver} uses the step before, and trajectory replays single steps; "
            "take euler"
        )


def check_span(algorithm: Any) -> None:
    """Raise InputError for settings that do not fit an objective which sums log ratios along whole paths."""
    objective, pruning = algorithm.objective.name, getattr(algorithm.tree, "prune", None)
    if algorithm.kernel.log_prob == "constant_free":
        raise InputError(
            f"algorithm.kernel.log_prob: {objective} sums log ratios over steps, and constant_free leaves out a different "
            "1 / std^2 at each step; take mean or sum"
        )
    if pruning is not None and pruning.rule == "depth":
        raise InputError(
            f"algorithm.tree.prune.rule: depth takes steps out of the paths that {objective} needs whole; take "
            "parent_top1 or extremes, which take their ends"
        )
    if algorithm.baseline.drops and algorithm.credit.name != "terminal":
        raise InputError(
            f"algorithm.baseline.{algorithm.baseline.drops}: by {algorithm.credit.name} single steps leave the update, of "
            f"paths that {objective} needs whole; take false"
        )


def check_paths(config: Any) -> None:
    """Raise InputError if the objective needs the ratios of whole paths, but the update replays only parts of them."""
    objective, credit = config.algorithm.objective, config.algorithm.credit.name
    if objective.span == "edge":
        return
    if config.train.split == "edges":
        raise InputError(
            f"train.split: edges deals the steps of a path to several optimizer steps, and {objective.name} needs them "
            "in one; take groups or samples"
        )
    if config.train.select is not None and credit != "terminal":
        raise InputError(
            f"train.select: by {credit} single steps leave the update, of paths that {objective.name} needs whole; "
            "take null"
        )


def check_stored(config: Any) -> None:
    """Raise InputError if a run on stored samples (`data.groups`) has a setting that needs rollouts of its own.

    The anchor may be the reference, which may have generated the stored samples, or the live policy, for which the
    ratio is 1. An old policy generated none of them, so a ratio to it would weigh them arbitrarily. A snapshot of the
    live policy may be the anchor only if it also samples the worse sample of each pair.
    """
    train, likelihood = config.train, config.algorithm.likelihood
    if config.algorithm.tree.name in SPLITTING:
        raise InputError(
            f"algorithm.tree: stored samples are ends of chains, {config.algorithm.tree.name} splits; take chain, "
            "and algorithm.credit=terminal"
        )
    if likelihood.name != "elbo":
        raise InputError(
            f"algorithm.likelihood: {likelihood.name} needs the steps of rollouts, and data.groups has final samples; take "
            "algorithm.preset=gdro, dpo, rwr or awm, say"
        )
    if likelihood.sampler == "bank" and not config.algorithm.objective.pairs:
        raise InputError(
            "algorithm.likelihood.sampler: beside data.groups a snapshot samples the worse one of a pair, and "
            f"{config.algorithm.objective.name} has none; take sampler=reference, or objective=semi_policy"
        )
    if likelihood.anchor == "bank" and likelihood.sampler != "bank":
        raise InputError(
            "algorithm.likelihood.anchor: bank is of snapshots of the live policy, which made none of data.groups; take "
            "algorithm.likelihood.sampler=bank, too, or anchor=reference"
        )
    for role in ("sampler", "anchor"):
        if getattr(likelihood, role) == "old":
            raise InputError(
                f"algorithm.likelihood.{role}: old is a policy that follows the live one, which made none of data.groups; "
                f"take algorithm.likelihood.{role}=reference or live"
            )
    if train.draft is not None:
        raise InputError(
            "train.draft: it chooses the starts of rollouts, and data.groups is sampled already; take null"
        )
    if config.prompts.pick.budget != "equal":
        raise InputError("prompts.pick.budget: data.groups has groups of one size, which do not grow; take equal")


def guidance_warnings(config: Any, branches: int) -> list[str]:
    """Return a warning if guidance does not fit likelihood elbo; `branches` are the guidance branches of a step."""
    if config.algorithm.likelihood.name != "elbo" or branches == 1:
        return []
    if config.model.guidance == "pipeline":
        return [
            "model.guidance: pipeline fits the guided velocity to final samples, which un-learns guidance; take rollout, "
            "which samples with guidance and trains the velocity without it, or none"
        ]
    if config.model.guidance == "none":
        return [
            f"model.guidance: with none {config.algorithm.preset} samples and trains without the guidance of model.call, "
            "which evaluations have; take rollout to sample with it"
        ]
    return []
