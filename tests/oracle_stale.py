"""Rows of `oracle_effects` of a policy that has moved since the rollout: stale rollouts, and several updates of one."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import oracle
import torch
from field import credit, step_of_part
from gaussian_flow import Gradient, Step, gradient, whole_gradient
from opened import Opened
from oracle import Seen, batch, trainer
from oracle_variants import STEPS, Effect, Family, Variant, chain_of, effect, times

from flowgrpo.training.scoring.rollout_batch import Made

BATCHES, GROUPS, SIZE = 12, 8, 8
RATE = 0.25  # of the exact gradient, by which the policy moves in a step while its rollouts wait
LOOSE = 1e6  # a clip range that nothing meets
FAMILY = Family("flow_grpo", "quadratic", (), batches=BATCHES, groups=GROUPS)
CLIPS = {"no clip": LOOSE, "clip 0.2": 0.2, "clip 0.02": 0.02}
PREFIX = {"name": "prefix_ratio", "clip_range": 15.0, "power": 0.0, "dual": None}
TRAJECTORY = {"name": "trajectory_ratio", "clip_range": LOOSE, "normalised": False}


def placed(kernel: str, level: float, theta: Sequence[float], phi: Sequence[float]) -> list[Step]:
    return [replace(each, theta=a, phi=b) for each, a, b in zip(chain_of(kernel, level), theta, phi, strict=True)]


def moved(count: int) -> tuple[list[float], list[float]]:
    """Return theta and phi after some steps along the exact gradient of what the chain earns."""
    theta, phi = [0.0] * STEPS, [0.0] * STEPS
    for _ in range(count):
        found = whole_gradient(placed("flow_sde", 0.7, theta, phi), "quadratic")
        theta = [old + RATE * each.theta for old, each in zip(theta, found, strict=True)]
        phi = [old + RATE * each.phi for old, each in zip(phi, found, strict=True)]
    return theta, phi


def stale(behind: int) -> list[Effect]:
    """Measure updates by batches that were rolled out some policy steps before, by some ratios.

    A ratio without a clip is to see the derivative by the step as it is now, between the steps before it as they were (by
    `prefix_ratio` and `trajectory_ratio` as they are) and those behind it as they were (by `trajectory_ratio` as they are,
    but for the last one, which is an ODE step). Sizes are along the gradient of now.
    """
    old, now = (placed("flow_sde", 0.7, *moved(count)) for count in (0, behind))
    exact, ode = whole_gradient(now, "quadratic"), whole_gradient(placed("ode", 0.0, *moved(behind)), "quadratic")
    own, share = range(STEPS - 1), 1 - 1 / SIZE
    whole = {i: times(exact[i], share) for i in own}
    objectives = {name: {"algorithm.objective.clip_range": CLIPS[name]} for name in ("no clip", "clip 0.2")}
    objectives |= {each["name"]: {"algorithm.objective": each} for each in (PREFIX, TRAJECTORY)}
    seen = _late(behind, [*objectives.values()])
    found = []
    for name, batches in zip(objectives, seen, strict=True):
        before = now if name in ("prefix_ratio", "trajectory_ratio") else old
        after = [*now[:-1], old[-1]] if name == "trajectory_ratio" else old
        aim = {i: times(gradient(before[:i], now[i], after[i + 1 :], "quadratic"), share) for i in own}
        clipped = name == "clip 0.2"
        batches = [replace(each, exact=whole if clipped else aim, chain=exact, ode=ode) for each in batches]
        one = effect(FAMILY, Variant(f"stale by {behind}, {name}", {}, None if clipped else 1.0), batches)
        if not clipped:
            length = oracle.along(*([each[i].theta for i in own] for each in (aim, whole)))
            one = replace(one, expected=length, size=one.size * length, error=one.error * length)
        found.append(one)
    return found


def _late(behind: int, changes: Sequence[dict[str, Any]]) -> list[list[Seen]]:
    """Roll out batches of each change by the policy where it began, and replay them where it has come to."""
    with ExitStack() as stack:
        options = {"groups": GROUPS, "run.staleness": behind}
        runs = [stack.enter_context(trainer("flow_grpo", "quadratic", **options, **change)) for change in changes]
        seen = [[] for _ in runs]
        for iteration in range(behind, behind + BATCHES):
            _put(runs[0], *moved(0))
            runs[0].versions.keep(iteration - behind, runs[0].prompt_stats.state())
            for run in runs:
                _put(run, *moved(behind))
            runs[0].versions.keep(iteration, runs[0].prompt_stats.state())
            made = runs[0].made(iteration)
            for run, own in zip(runs, seen, strict=True):
                own.append(batch(run, "quadratic", iteration, made))
    return seen


@torch.no_grad()
def _put(run: Opened, theta: Sequence[float], phi: Sequence[float]) -> None:
    model = run.policy.modules["field"]
    model.theta.copy_(torch.tensor(theta))
    model.phi.copy_(torch.tensor(phi))


def passes(parts: int = 4) -> list[Effect]:
    """Take steps of SGD on the parts of one batch, and compare where they lead with what each would do by itself."""
    rate = RATE * (STEPS - 1)
    with ExitStack() as stack:
        options = {"groups": GROUPS, "train.updates": parts, "train.split": "samples"}
        runs = [
            stack.enter_context(
                trainer("flow_grpo", "quadratic", **options, **{"algorithm.objective.clip_range": each})
            )
            for each in CLIPS.values()
        ]
        seen = [[] for _ in runs]
        for iteration in range(BATCHES):
            _put(runs[0], *moved(0))
            made = runs[0].made(iteration)
            plain = batch(runs[0], "quadratic", iteration, made)
            for run, own in zip(runs, seen, strict=True):
                own.append(replace(plain, signal=_stepped(run, made, rate)))
    named = zip(CLIPS, seen, strict=True)
    return [effect(FAMILY, Variant(f"{parts} updates, {name}", {}, None), own) for name, own in named]


@torch.no_grad()
def _stepped(run: Opened, made: Made, rate: float) -> dict[int, Gradient]:
    """Return how far the parameters of each step have moved, over the rate and the number of parts."""
    _put(run, *moved(0))
    with torch.enable_grad():
        credited, optimizer = credit(run, made.batch), torch.optim.SGD(run.weights.parameters, lr=rate)
        for part in range(run.config.train.updates):
            step_of_part(run, credited, part, optimizer)
    model, each = run.policy.modules["field"], (STEPS - 1) / (rate * run.config.train.updates)
    return {i: Gradient(each * float(model.theta[i]), each * float(model.phi[i])) for i in range(STEPS - 1)}
