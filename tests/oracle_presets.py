"""Print the table of all presets of docs/research/oracle.md: updates by the code of a run against exact gradients.

python research/oracle_tables.py presets [PRESET ...] [--reward linear] [--set KEY=VALUE ...]
"""

import argparse
import math
from typing import Any

import oracle
import oracle_samples
import oracle_texts
import torch
import yaml
from gaussian_flow import REWARDS

FLOW = (*oracle.PRESETS, *oracle_samples.PRESETS)
TEXTS = {each.preset: each for each in oracle_texts.VARIANTS if each.name is None}
PRESETS = (*FLOW, *TEXTS)
HEADS = ("preset", "evaluations", "size", "steps", "to sampler", "to ODE", "noise", "of 1,000")


def row(preset: str, reward: str = "quadratic", batches: int | None = None, **overrides: Any) -> str:
    """Return the row of a preset in Markdown, by default on as many batches as its kind needs."""
    counted = {} if batches is None else {"batches": batches}
    if preset in TEXTS:
        return line(oracle_texts.row(TEXTS[preset], **counted))
    module = oracle_samples if preset in oracle_samples.PRESETS else oracle
    return line(module.row(preset, reward, **counted, **overrides))


def line(found: oracle.Row | oracle_texts.Row) -> str:
    text = isinstance(found, oracle_texts.Row)
    cells = (
        f"`{found.name if text else found.preset}`",
        f"{found.evaluations:.0f}",
        "-" if found.size is None else f"{found.size:.2f} ± {found.error:.2f}",
        "-" if found.worst is None else f"{found.worst:.1f} of {found.compared}",
        f"{found.cosine if text else found.to_chain:.3f}",
        "-" if text else f"{found.to_ode:.3f}",
        f"{found.noise:.2f}",
        f"{found.noise * math.sqrt(found.evaluations / 1000):.2f}",
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("presets", nargs="*", metavar="PRESET", help="those to try; by default all")
    parser.add_argument("--reward", choices=REWARDS, default="quadratic", help="of flow presets")
    by_default = "to try each on; by default 20 or 40, 20 of final samples, 12 of texts"
    parser.add_argument("--batches", type=int, help=by_default)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides, for all flow presets")
    asked = parser.parse_args()
    if strange := [preset for preset in asked.presets if preset not in PRESETS]:
        parser.error(f"there is no preset {strange[0]!r}, choose from {', '.join(PRESETS)}")
    if asked.batches is not None and asked.batches < 2:
        parser.error(f"--batches: {asked.batches} tells no error, take 2 or more")
    torch.set_num_threads(1)
    overrides = {key: yaml.safe_load(value) for key, _, value in (each.partition("=") for each in asked.set)}
    print("| " + " | ".join(HEADS) + " |\n" + "|---" * len(HEADS) + "|")
    for preset in asked.presets or PRESETS:
        print(row(preset, asked.reward, asked.batches, **overrides), flush=True)
