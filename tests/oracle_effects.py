"""Measure what clip, baselines, selection, drafts, pruning and other changes make of an update, as a table.

    python research/oracle_tables.py effects

Each row is a preset of `oracle` with something changed, held against the gradient that is exact for the preset.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from oracle_families import FAMILIES
from oracle_page import markdown
from oracle_stale import passes, stale
from oracle_variants import Effect, effects


def rows() -> Iterator[Effect]:
    for family in FAMILIES:
        yield from effects(family())
    for behind in (1, 2, 4):
        yield from stale(behind)
    yield from passes()


HEADS = (
    "what is changed", "of", "expected", "size", "phi / theta", "turned", "to chain", "to ODE", "noise", "of 1,000",
)  # fmt: skip


def table(found: Sequence[Effect]) -> Iterator[str]:
    rows = (
        [
            each.name,
            f"`{each.preset}`, {each.reward}",
            "-" if each.expected is None else f"{each.expected:.3f}",
            f"{each.size:.3f} ± {each.error:.3f}",
            f"{each.phi:.2f} ± {each.phi_error:.2f}",
            f"{each.turned:.1f}",
            f"{each.to_chain:.3f}",
            f"{each.to_ode:.3f}",
            f"{each.noise:.2f}",
            f"{each.noise * math.sqrt(each.evaluations / 1000):.2f}",
        ]
        for each in found
    )
    return markdown(HEADS, rows)


def main() -> None:
    torch.set_num_threads(1)
    for line in table([*rows()]):
        print(line)
