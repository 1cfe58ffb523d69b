"""Calls of a language model with LLaDA-8B's shape and random weights: what is planned, and what a GPU takes."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench_large_text

from flowgrpo.mdlm.planning import iteration_cost
from flowgrpo.mdlm.planning.memory_budget import budget_of
from flowgrpo.mdlm.planning.plan import plan
from gpu_parts import iteration

SMALL = {"vocabulary": 64, "hidden": 32, "layers": 2, "heads": 4, "rank": 2, "prompt": 5, "length": 8, "steps": 4}
SMALL |= {"block-length": 4, "group-size": 2, "groups": 1}
REAL = {"groups": 1, "group-size": 8, "steps": 16}  # steps of a decoding: calls are the same in a longer one


def options_of(rows: int, *, cache: str | None = None, shrunk: bool = False) -> argparse.Namespace:
    """Return the options of `bench_large_text.py` for calls of `rows` answers."""
    sizes = (SMALL if shrunk else REAL) | {"micro-batch": rows, "rollout-batch": rows}
    words = [f"--{name}={size}" for name, size in sizes.items()]
    words += [f"--dtype={'float32' if shrunk else 'bfloat16'}", *([f"--cache={cache}"] if cache else [])]
    return bench_large_text.parser().parse_args(words)


def planned(rows: Sequence[int], *, shrunk: bool = False) -> dict[str, Any]:
    """Return `iteration.by_rows`; no GPU is needed."""
    options = options_of(max(rows), shrunk=shrunk)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bench_large_text.llama(options).save_pretrained(folder / "model")
        prompts = folder / "prompts.txt"
        prompts.write_text("a" * options.prompt + "\n")
        chosen = bench_large_text.settings(options, folder)
        prompt_section = chosen.prompts.model_copy(update={"train": str(prompts)})
        with budget_of(chosen.model_copy(update={"prompts": prompt_section})) as budget:
            counted = iteration.by_rows(budget, lambda each: iteration_cost.work(each, plan(each.config)), rows)
    return {"dtype": options.dtype, "samples": options.groups * options.group_size, "rows": counted}


def measured(rows: int, *, cache: str | None = None, shrunk: bool = False) -> dict[str, Any]:
    """Return `iteration.measure` of decoding and of GDPO's update, in calls of `rows`.

    Args:
        cache: of keys and values, for the decoder.
    """
    iteration.forget()
    with tempfile.TemporaryDirectory() as folder:
        loop = bench_large_text.loop_of(options_of(rows, cache=cache, shrunk=shrunk), Path(folder))
        # A recorded call has a cache that later calls have written.
        return iteration.measure(loop, None if cache else loop.state.policy.predictor.model)
