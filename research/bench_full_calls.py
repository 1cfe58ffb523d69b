"""Measure what a decode of texts would save at most if waiting prompts took the places of rows that have ended.

    python research/bench_full_calls.py [--rounds 5] [--json FILE] [--model digits] [--count 128] [--rows 32]

A decode leaves ended rows out of its calls, which then have fewer rows than `--rows`. For each decoder this script
records the rows and columns of all calls of the network, and repeats them bare in two ways, in turns: as they were, and
with the rows of equal columns joined into full calls. No refilling can have fewer calls. Answers are drawn at
temperature 1. Prints the ratios of full calls to the calls as they were, and the rows of a mean call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import paired
import torch

from flowgrpo.data.generators.tasks import problems
from flowgrpo.mdlm.decoding.decoders import build
from flowgrpo.mdlm.models.load import load_predictor
from flowgrpo.mdlm.policy import TextPolicy

Calls = list[tuple[int, int]]  # rows and columns of each call

_ENDS = {"region": {"name": "blocks", "block_length": 4}, "eos_early_stop": True}
SPECS: dict[str, dict[str, Any]] = {
    "low_confidence, four a step": {"name": "low_confidence", "steps": 5},
    "threshold": {"name": "threshold"},
    "threshold, blocks of 4, to the end": {"name": "threshold", **_ENDS},
    "threshold, blocks of 4, to the end, dual cache": {"name": "threshold", "cache": "dual", **_ENDS},
    "left_to_right, blocks of 4, to the end": {"name": "left_to_right", **_ENDS},
    "left_to_right, blocks of 4, to the end, dual cache": {"name": "left_to_right", "cache": "dual", **_ENDS},
}


def recorded(policy: TextPolicy, spec: dict[str, Any], prompts: Sequence[str], rows: int) -> Calls:
    """Return the calls of a decode in batches of at most `rows` answers."""
    calls: Calls = []
    hook = policy.predictor.model.register_forward_pre_hook(lambda _, given: calls.append(tuple(given[0].shape)))
    decoder = build({**spec, "proposal": {"temperature": 1.0}}, policy.length, policy.eos_id, policy.predictor)
    policy.generate(prompts, decoder, [(0, "bench", i) for i in range(len(prompts))], rows)
    hook.remove()
    return calls


def full(calls: Calls, rows: int) -> Calls:
    """Return calls of at most `rows` rows with the same evaluations."""
    totals: Counter[int] = Counter()
    for count, columns in calls:
        totals[columns] += count
    return [(min(rows, total - first), columns) for columns, total in totals.items() for first in range(0, total, rows)]


def repeat(policy: TextPolicy, calls: Calls) -> paired.Work:
    """Return the work of calling the network alone."""

    def work() -> None:
        with torch.no_grad():
            for shape in calls:
                policy.predictor.model(torch.zeros(shape, dtype=torch.long), use_cache=False)

    return work


def main() -> None:
    """Run the command line."""
    parser = paired.parser(__doc__, 5)
    parser.add_argument("--model", default="digits")
    parser.add_argument("--count", type=int, default=128, help="answers, half of Countdown and half of Sudoku")
    parser.add_argument("--rows", type=int, default=32, help="most answers that are decoded together")
    options = parser.parse_args()
    policy = TextPolicy(*load_predictor(options.model), 20)
    prompts = [row["prompt"] for task in ("countdown", "sudoku") for row in problems(task, "eval", options.count // 2)]
    ratios: dict[str, paired.Ratio] = {}
    for name, spec in SPECS.items():
        calls = recorded(policy, spec, prompts, options.rows)
        joined = full(calls, options.rows)
        works = {"full": repeat(policy, joined), "as they were": repeat(policy, calls)}
        seconds = paired.in_turns(works, options.rounds)
        ratios[f"{name}, full / as they were"] = paired.paired(*seconds.values())
        ratios[f"{name}, calls"] = paired.exactly(len(joined) / len(calls))
        ratios[f"{name}, rows of a call"] = paired.exactly(sum(rows for rows, _ in calls) / len(calls))
    paired.tell(ratios, options)


if __name__ == "__main__":
    main()
