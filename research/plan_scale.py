"""Plan memory and traffic per GPU if 1 to 512 GPUs share a model; prints the tables of docs/research/scale.md.

    HF_HUB_OFFLINE=1 python research/plan_scale.py [NAME ...]

Each GPU does the same work, whatever their number: an eighth of the groups of a built-in config in one optimizer step,
with checkpointed activations. Memory is for calls of one row. The bytes that a GPU sends are those of an iteration with
the config's batch sizes. Nothing is downloaded; each model takes one or two minutes of one core.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from plan_models import stand_in

from flowgrpo import config
from flowgrpo.commands.model_kinds import KINDS
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.planning.gpu_scaling import Prices
from flowgrpo.training.planning.iteration_cost import Work
from flowgrpo.training.planning.memory_budget import GIB, ROLLOUT, UPDATE, Budget, at, with_setting

NAMES = ("flux1-dev", "qwen-image", "wan22-14b", "llada-8b")
PROCESSES = (1, 8, 64, 512)
ALONE = {ROLLOUT: 1, UPDATE: 1}


def settings_of(name: str, *, full: bool, folder: Path) -> RunConfig:
    """Return a built-in config with the work of one GPU among eight and checkpointed activations."""
    overrides = [*stand_in(name, folder), "model.gradient_checkpointing=true"]
    groups = config.load(name, overrides).train.groups
    return config.load(
        name,
        [
            *overrides,
            f"train.groups={-(-groups // 8)}",
            "train.updates=1",
            *(["model.lora=null", "model.quantise=null"] if full else []),
        ],
    )


def cells(budget: Budget, of: Callable[[Budget], str]) -> list[str]:
    """Return a cell for each number of GPUs; several GPUs have two values: shards over all, and within each machine."""
    found = []
    for processes in PROCESSES:
        many = budget.on_processes(processes, times=processes)
        forms = ("none",) if processes == 1 else ("fsdp2", "hsdp")
        found.append(
            " / ".join(of(replace(many, config=with_setting(many.config, "run.sharding", form))) for form in forms)
        )
    return found


def size(budget: Budget) -> str:
    """Return the peak GiB on a GPU and its phase, as text."""
    most = max(at(budget.phases(), ALONE), key=lambda phase: phase.total)
    return f"{most.total / GIB:.0f} ({most.name})"


def sent(budget: Budget, work: Work) -> str:
    """Return the GB that each GPU sends in an iteration, as text; all do the same work."""
    cost = Prices(gpu_type="h100", fixed=0.0).cost(budget, work.times(budget.layout.processes))
    found = sum(cost.sent.values()) / 1e9
    return f"{found:,.1f}" if found < 100 else f"{found:,.0f}"


def row(name: str, values: list[str], *, full: bool) -> str:
    """Return a row of a table."""
    return f"| {' | '.join((f'`{name}`', 'all' if full else 'a LoRA', *values))} |"


def main(names: list[str]) -> int:
    """Print the tables: GiB on a GPU, then GB that it sends."""
    heads = ["model", "trained", *(f"{n} GPUs" if n > 1 else "1 GPU" for n in PROCESSES)]
    head = f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}"
    traffic = []
    print(head)
    with tempfile.TemporaryDirectory() as folder:
        for name in names or NAMES:
            for full in (False, True):
                settings = settings_of(name, full=full, folder=Path(folder))
                kind = KINDS[settings.kind]
                with kind.budget.budget_of(settings) as budget:
                    print(row(name, cells(budget, size), full=full), flush=True)
                    work = kind.cost.work(budget, kind.plan.plan(settings))
                    traffic.append(row(name, cells(budget, partial(sent, work=work)), full=full))
    print(f"\n{head}", *traffic, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
