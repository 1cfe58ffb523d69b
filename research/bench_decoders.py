"""Measure decoders on the embedded language model: held-out accuracy of each task, and model evaluations of an answer.

    python research/bench_decoders.py [--model digits] [--count 256] [--length 20] [--controller DIR]

Prints a table in Markdown. All decoders sample at temperature 0; the order of `random` and `origin` is random.
Evaluations are the mean over the answers, since some decoders take fewer steps where the model is confident. An
evaluation with a cache counts like one without. The time is that of an answer in batches of 128. `--controller`, a
folder of `flowgrpo mdlm tracelock`, adds `trace_lock`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

from flowgrpo.data.generators.tasks import TASKS, problems
from flowgrpo.mdlm.decoding.decoders import build
from flowgrpo.mdlm.models.load import load_predictor
from flowgrpo.mdlm.policy import TextPolicy
from rewards.texts.text import solved

_IN_BLOCKS = {"name": "left_to_right", "region": {"name": "blocks", "block_length": 4}, "eos_early_stop": True}
SPECS: dict[str, dict[str, Any]] = {
    "low_confidence, one a step": {"name": "low_confidence"},
    "low_confidence, two a step": {"name": "low_confidence", "steps": 10},
    "low_confidence, four a step": {"name": "low_confidence", "steps": 5},
    "low_confidence, blocks of 10": {"name": "low_confidence", "region": {"name": "blocks", "block_length": 10}},
    "left_to_right": {"name": "left_to_right"},
    "left_to_right, blocks of 4, to the end": _IN_BLOCKS,
    "the same, prefix cache": {**_IN_BLOCKS, "cache": "prefix"},
    "the same, dual cache": {**_IN_BLOCKS, "cache": "dual"},
    "random": {"name": "random"},
    "origin": {"name": "origin"},
    "topk_margin": {"name": "topk_margin"},
    "entropy": {"name": "entropy"},
    "entropy, four a step": {"name": "entropy", "steps": 5},
    "eoser": {"name": "eoser"},
    "eoser, four a step": {"name": "eoser", "steps": 5},
    "ass": {"name": "ass"},
    "eoser_ass": {"name": "eoser_ass"},
    "threshold 0.9": {"name": "threshold"},
    "threshold 0.6": {"name": "threshold", "committer": {"threshold": 0.6}},
    "factor 1": {"name": "factor"},
    "block_refinement": {"name": "block_refinement", "steps": 10},
}


def measured(policy: TextPolicy, spec: dict[str, Any], task: str, count: int) -> tuple[float, float, float]:
    """Return the accuracy, and the model evaluations and milliseconds of an answer."""
    rows = problems(task, "eval", count)
    decoder = build(spec, policy.length, policy.eos_id)
    prompts = [row["prompt"] for row in rows]
    started = time.perf_counter()
    completions = policy.generate(prompts, decoder, [(0, "bench", i) for i in range(count)], 128)
    took = 1000 * (time.perf_counter() - started) / count
    columns = {key: [row[key] for row in rows] for key in rows[0] if key != "prompt"}
    return (
        statistics.mean(solved(completions.texts, prompts, **columns)),
        float(completions.rollout.nfe.double().mean()),
        took,
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="digits")
    parser.add_argument("--count", type=int, default=256, help="problems of each task")
    parser.add_argument("--length", type=int, default=20, help="tokens of an answer")
    parser.add_argument("--controller", help="folder of a controller for trace_lock")
    options = parser.parse_args()
    specs = {**SPECS}
    if options.controller:
        specs["trace_lock"] = {"name": "trace_lock", "scorer": {"controller": options.controller}}
    policy = TextPolicy(*load_predictor(options.model), options.length)
    print(f"| decoder | {' | '.join(TASKS)} | evaluations of an answer | ms |")
    print("|---|" + "---|" * (len(TASKS) + 2))
    for name, spec in specs.items():
        accuracies, evaluations, took = zip(*(measured(policy, spec, t, options.count) for t in TASKS), strict=True)
        cells = [f"{accuracy:.3f}" for accuracy in accuracies]
        print(f"| {name} | {' | '.join(cells)} | {statistics.mean(evaluations):.1f} | {statistics.mean(took):.0f} |")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
