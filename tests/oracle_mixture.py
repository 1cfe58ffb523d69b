"""Hold updates of chains, brushes and twigs on a mixture of two Gaussians against the exact gradient, as a table.

    python research/oracle_tables.py mixture

The model is `mixture_flow`, on which a rule of advantage may turn an update, as it cannot on one Gaussian.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import mixture_flow
import oracle
import torch
from gaussian_flow import Step, cosine, step
from mixture_flow import REWARDS, SIGMAS
from oracle_page import markdown

STEPS = len(SIGMAS) - 1
PAIRS = list(pairwise(SIGMAS))
ODE = [step("ode", 0.0, *pair, SIGMAS[1]) for pair in PAIRS]
CHAIN: list[Step] = [step("flow_sde", 0.7, *pair, SIGMAS[1]) for pair in PAIRS[:-1]] + ODE[-1:]


class Shifted(torch.nn.Module):
    """The exact velocity of the mixture with a shift and a slope for each step, all 0."""

    def __init__(self):
        super().__init__()
        self.theta, self.phi = (torch.nn.Parameter(torch.zeros(STEPS)) for _ in range(2))

    def forward(self, x: torch.Tensor, sigma: torch.Tensor, rows: Sequence[Any]) -> torch.Tensor:
        """The velocity (B, 1) at states (B, 1), of one sigma."""
        index = min(range(STEPS), key=lambda i: abs(SIGMAS[i] - float(sigma[0])))
        return mixture_flow.velocity(x, SIGMAS[index]) + self.theta[index] + self.phi[index] * x


@dataclass(frozen=True)
class Family:
    """Variants of a preset on the same rollouts.

    Attributes:
        sees: what the edges see: a chain's reward, or that of branches of an ODE trunk or of a chain.
        share: what the group's mean leaves of it.
        variants: changes of the preset and, where it is known, the size of its update, of which the preset's own has 1.
    """

    preset: str
    sees: str
    share: float
    variants: Mapping[str, tuple[Mapping[str, Any], float | None]]
    _: KW_ONLY
    batches: int
    groups: int
    base: Mapping[str, Any] = field(default_factory=dict)


UNCUT = 1e6  # where advantages are cut: the quadratic reward has some far below -5, where presets cut them
_AS_IT_IS = {"uncut": ({"algorithm.baseline.clip": UNCUT}, 1.0)}
_LEAVE_ONE_OUT = {"algorithm.baseline": {"name": "leave_one_out", "clip": UNCUT}}
_MEDIAN = {"algorithm.baseline": {"name": "median", "std": "none", "clip": UNCUT}}
_STD = {"algorithm.baseline.std": "group"}
_BY_CHAIN = {
    **_AS_IT_IS,
    "advantages cut at 5": ({}, None),
    "leave_one_out": (_LEAVE_ONE_OUT, 8 / 7),
    "median": (_MEDIAN, None),
    "std of the group": (_STD, None),
}
_BY_TWIGS = {**_AS_IT_IS, "gains over their std": (_STD, None)}
_EVEN = {"algorithm.objective.step_weights": "none"}
FAMILIES = (
    Family("flow_grpo", "chain", 7 / 8, _BY_CHAIN, batches=14, groups=12),
    Family("tempflow", "brush", 5 / 6, _AS_IT_IS, batches=10, groups=3, base=_EVEN),
    Family("dense_grpo", "twigs", 7 / 8, _BY_TWIGS, batches=10, groups=5),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a variant's update by the shifts was; as of `oracle_effects.Effect`, cosines as they were seen."""

    name: str
    expected: float | None
    size: float
    error: float
    turned: float
    to_chain: float
    to_ode: float
    noise: float


@cache
def exact(sees: str, reward: str) -> list[float]:
    """Differentiate the reward that edges of a kind see, or that ODE samples earn, by the shifts of the noisy steps."""
    earned = REWARDS[reward]
    if sees == "ode":
        return mixture_flow.of_ode(ODE, earned)[1][:-1]
    if sees == "chain":
        return mixture_flow.of_chain(CHAIN, earned)[1]
    trunk = mixture_flow.ode_trunk(ODE) if sees == "brush" else mixture_flow.chain_trunk(CHAIN)
    return mixture_flow.of_branches(CHAIN, ODE, earned, trunk)


def rows(family: Family, reward: str) -> list[Row]:
    with ExitStack() as stack:
        options = {"groups": family.groups, "earned": REWARDS[reward], **family.base}
        runs = [
            stack.enter_context(oracle.trainer(family.preset, reward, model=Shifted(), **options, **changes))
            for changes, _ in family.variants.values()
        ]
        seen: list[list[list[float]]] = [[] for _ in runs]
        for iteration in range(family.batches):
            made = runs[0].made(iteration)
            for run, own in zip(runs, seen, strict=True):
                run.done = iteration
                signal, _ = oracle.replay(run, made)
                own.append([signal[i].theta for i in range(STEPS - 1)])
    aim = [family.share * each for each in exact(family.sees, reward)]
    named = zip(family.variants.items(), seen, strict=True)
    head = f"`{family.preset}`, {reward}"
    return [_row(family, f"{head}, {name}", aim, own, reward, known) for (name, (_, known)), own in named]


def _row(
    family: Family, name: str, aim: Sequence[float], seen: list[list[float]], reward: str, known: float | None
) -> Row:
    sizes = [[oracle.along(each, aim)] for each in seen]
    (size,), (spread,) = oracle.mean_and_std(sizes)
    mean, total = oracle.mean_and_std(seen)
    gaps = [[value - size * to for value, to in zip(each, aim, strict=True)] for each in seen]
    apart = [abs(m / s) * math.sqrt(family.batches) for m, s in zip(*oracle.mean_and_std(gaps), strict=True)]
    return Row(
        name=name, expected=known, size=size, error=spread / math.sqrt(family.batches), turned=max(apart),
        to_chain=cosine(mean, exact("chain", reward)), to_ode=cosine(mean, exact("ode", reward)),
        noise=math.sqrt(family.groups * sum(s * s for s in total) / sum(m * m for m in mean)),
    )  # fmt: skip


HEADS = ("preset, reward, advantages", "expected", "size", "turned", "to chain", "to ODE", "noise")


def table(found: Sequence[Row]) -> Iterator[str]:
    rows = (
        [
            each.name,
            "-" if each.expected is None else f"{each.expected:.2f}",
            f"{each.size:.2f} ± {each.error:.2f}",
            f"{each.turned:.1f}",
            f"{each.to_chain:.3f}",
            f"{each.to_ode:.3f}",
            f"{each.noise:.2f}",
        ]
        for each in found
    )
    return markdown(HEADS, rows)


def main() -> None:
    torch.set_num_threads(1)
    found = [row for reward in REWARDS for family in FAMILIES for row in rows(family, reward)]
    for line in table(found):
        print(line)
