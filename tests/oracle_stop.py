"""Print the table of docs/research/oracle.md of chains that are stopped early: evaluations saved and variance added.

    python research/oracle_tables.py stop [--reward linear] [--batches 400] [--std 0.5 8.0]

Chains are of the Gaussian flow of `oracle`, by the code of a run, for data of two stds. Clean estimates foretell narrow data
late and wide data early. All rows have the same chains, by the addresses of their noise.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from field import step_in_place
from gaussian_flow import REWARDS, whole_gradient
from oracle import GROUPS, SIGMAS, Shifted, paths, trainer
from oracle_page import markdown

STEPS = len(SIGMAS) - 2  # stochastic ones, all trained
STDS = (0.5, 8.0)  # of the data
STOPS: tuple[dict[str, Any], ...] = (
    *({"step": step} for step in (3, 5, 7, 9)),
    {"step": 7, "keep": 0.5, "floor": 0.25},
)
PLAIN = {"algorithm.baseline": {"name": "leave_one_out", "std": "none", "clip": 1e9}}


@dataclass(frozen=True)
class Measured:
    """Of chains with or without a stop.

    Attributes:
        updates: (batches, steps) by theta, whose expectation is the exact gradient.
        exact: (steps,) that gradient.
        evaluations: of the model for a group, rollout and update, on average.
        decoded: samples and clean estimates of a group, on average.
        correlation: of foretold and final rewards; NaN without a stop.
    """

    updates: torch.Tensor
    exact: torch.Tensor
    evaluations: float
    decoded: float
    correlation: float


def measure(
    reward: str,
    stop: dict[str, Any] | None,
    batches: int,
    *,
    std: float = 0.5,
    naive: bool = False,
    groups: int = GROUPS,
) -> Measured:
    """Roll out, credit and replay some batches, and take no step; `naive` compares survivors as if they were all."""
    updates, pairs, evaluations, decoded = [], [], 0, 0
    options = {**PLAIN, "algorithm.tree.stop": stop}
    with trainer("flow_grpo", reward, groups=groups, model=Shifted(std), **options) as run:
        for iteration in range(batches):
            run.done = iteration
            made, before = run.made(iteration), run.evaluations
            batch = made.batch
            decoded += batch.decoded
            if naive:
                batch = replace(batch, stopped=None)
            compared = run.compare(batch)
            if (survival := compared.units.survival) is not None:
                pairs.append(torch.cat([survival.foretold, compared.units.values, survival.weight[:, None]], 1))
            step_in_place(run, run.credit_edges(batch, compared))
            evaluations += made.evaluations + run.evaluations - before
            updates.append(-run.policy.modules["field"].theta.grad[:STEPS].double() * STEPS)
        chain = [replace(each, std=std) for each in paths(batch.tree)[0]]
    exact = torch.tensor([each.theta for each in whole_gradient(chain, reward)[:STEPS]]).double()
    each = batches * groups
    return Measured(torch.stack(updates), exact, evaluations / each, decoded / each, correlation(pairs))


def correlation(pairs: list[torch.Tensor]) -> float:
    """Return the correlation of foretold and final rewards, of survivors (foretold, final, weight), for all chains."""
    if not pairs:
        return torch.nan
    foretold, final, weight = torch.cat([each[each[:, 2] > 0] for each in pairs]).unbind(1)
    (a, c), (_, b) = torch.stack([foretold, final]).cov(aweights=weight).tolist()
    return c / (a * b) ** 0.5


def price(found: Measured) -> torch.Tensor:
    """Return for each batch the evaluations that an update of relative variance 1 costs, by the exact gradient."""
    return found.evaluations * ((found.updates - found.exact) ** 2).sum(1) / (found.exact**2).sum()


def ratio(found: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Return the ratio of the means of two paired tensors (batches,), and its standard error."""
    share = float(found.mean() / other.mean())
    return share, float((found - share * other).std() / other.mean()) / len(found) ** 0.5


def table(reward: str, batches: int, stds: Sequence[float]) -> Iterator[str]:
    """The stops as a table of Markdown, a row for each flow and stop."""
    heads = ("std of the data", "step", "keep", "floor", "correlation", "evaluations", "variance", "product")
    yield from markdown(heads, ())
    for std in stds:
        whole = measure(reward, None, batches, std=std)
        for stop in STOPS:
            found = measure(reward, stop, batches, std=std)
            variance, _ = ratio(price(found) / found.evaluations, price(whole) / whole.evaluations)
            product, error = ratio(price(found), price(whole))
            options = f"{std} | {stop['step']} | {stop.get('keep', 0.75)} | {stop.get('floor', 0.5)}"
            share = found.evaluations / whole.evaluations
            yield f"| {options} | {found.correlation:.2f} | {share:.2f} | {variance:.2f} | {product:.2f} ± {error:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reward", choices=REWARDS, default="linear")
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--std", type=float, choices=STDS, nargs="*", default=STDS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for line in table(asked.reward, asked.batches, asked.std):
        print(line, flush=True)
