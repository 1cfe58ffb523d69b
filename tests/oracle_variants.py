"""What a change makes of a preset's update: how variants of presets are tried, and what is summed up of them."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import pairwise
from typing import Any

import oracle
from gaussian_flow import Gradient, Step, cosine
from oracle import SIGMAS, Seen, batch, trainer

STEPS = len(SIGMAS) - 1


@dataclass(frozen=True)
class Variant:
    """A change of a preset, and the factor of its update's size.

    `factor` is by step where it differs, and None where no closed form is known.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    factor: float | Mapping[int, float] | None = 1.0


@dataclass(frozen=True)
class Family:
    """Variants of a preset; `shared`, of the same rollouts."""

    preset: str
    reward: str
    variants: Sequence[Variant]
    _: KW_ONLY
    batches: int
    groups: int
    base: Mapping[str, Any] = field(default_factory=dict)
    shared: bool = True


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What a variant's update was.

    Attributes:
        expected: its length along the update of the preset as it stands; None where no closed form is known.
        size, error: as seen, and its standard error.
        phi, phi_error: the same of the slopes' part, over the size of the shifts'.
        turned: the largest distance of a step's signal from size times what is expected, in standard errors.
        to_chain, to_ode: cosines of the update by theta, as expected, or else as seen.
        noise: of a group's update by theta over its length.
    """

    name: str
    preset: str
    reward: str
    expected: float | None
    size: float
    error: float
    phi: float
    phi_error: float
    turned: float
    to_chain: float
    to_ode: float
    noise: float
    evaluations: float


def effects(family: Family) -> list[Effect]:
    with ExitStack() as stack:
        options = {"groups": family.groups, **family.base}
        runs = [
            stack.enter_context(trainer(family.preset, family.reward, **options, **variant.changes))
            for variant in family.variants
        ]
        seen = [[] for _ in runs]
        for iteration in range(family.batches):
            made = None
            for run, own in zip(runs, seen, strict=True):
                made = made if family.shared and made else run.made(iteration)
                own.append(batch(run, family.reward, iteration, made))
    return [effect(family, *pair) for pair in zip(family.variants, seen, strict=True)]


def effect(family: Family, variant: Variant, seen: Sequence[Seen]) -> Effect:
    by_step = isinstance(variant.factor, Mapping)
    if by_step:
        scaled = {i: times(each, variant.factor[i]) for i, each in seen[0].exact.items()}
        seen = [replace(each, exact=scaled) for each in seen]
    update, aim = ([_row(each, name, "theta") for each in seen] for name in ("signal", "exact"))
    size, error = _mean([oracle.along(own, each) for own, each in zip(update, aim, strict=True)])
    slopes = [oracle.along(_row(each, "signal", "phi"), _row(each, "exact", "phi")) / size for each in seen]
    phi, phi_error = _mean(slopes)
    turned = 0.0
    for i in seen[0].signal:
        gap, spread = _mean([each.signal[i].theta - size * each.exact[i].theta for each in seen if i in each.signal])
        turned = max(turned, abs(gap / spread))
    mean, spread = oracle.mean_and_std(update)
    direction = mean if variant.factor is None else oracle.mean_and_std(aim)[0]
    return Effect(
        name=variant.name, preset=family.preset, reward=family.reward, evaluations=seen[0].evaluations,
        expected=1.0 if by_step else variant.factor,
        size=size, error=error, phi=phi, phi_error=phi_error, turned=turned,
        to_chain=cosine(direction[:-1], [each.theta for each in seen[0].chain][:-1]),
        to_ode=cosine(direction[:-1], [each.theta for each in seen[0].ode][:-1]),
        noise=math.sqrt(family.groups * sum(s * s for s in spread) / sum(m * m for m in mean)),
    )  # fmt: skip


def _row(seen: Seen, name: str, parameter: str) -> list[float]:
    found = getattr(seen, name)
    return [seen.weight.get(i, 0.0) * getattr(found[i], parameter) if i in found else 0.0 for i in range(STEPS)]


def _mean(values: Sequence[float]) -> tuple[float, float]:
    (mean,), (spread,) = oracle.mean_and_std([[value] for value in values])
    return mean, spread / math.sqrt(len(values))


def times(found: Gradient, factor: float) -> Gradient:
    return Gradient(factor * found.theta, factor * found.phi)


def chain_of(kernel: str, level: float) -> list[Step]:
    """The steps of a chain, the last one by ODE."""
    kernels = [(kernel, level)] * (STEPS - 1) + [("ode", 0.0)]
    return [oracle.step(*each, *pair, SIGMAS[1]) for each, pair in zip(kernels, pairwise(SIGMAS), strict=True)]
