"""Plan the memory of a GPU among 1 to 512 that share a model; prints the table of docs/scale.md.

    HF_HUB_OFFLINE=1 python scripts/plan_scale.py [NAME ...]

Each GPU does the same work whatever their number: an eighth of the groups of a built-in config, one row in each call, its
activations checkpointed. Nothing is downloaded; one or two minutes of one core for each model.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from plan_models import stand_in

from flowgrpo import config
from flowgrpo.commands.kinds import KINDS
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.budget import GIB, ROLLOUT, UPDATE, Budget, at, switched

NAMES = ("flux1-dev", "qwen-image", "wan22-14b", "llada-8b")
PROCESSES = (1, 8, 64, 512)
OF_MACHINE = 8
ALONE = {ROLLOUT: 1, UPDATE: 1}


def settings_of(name: str, *, full: bool, folder: Path) -> RunConfig:
    """A built-in config with the work of one GPU among eight, its activations checkpointed."""
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


def sizes(budget: Budget) -> list[str]:
    """GiB on a GPU for each number of them: whole on each, in shards over all, in shards within a machine."""
    found = []
    for processes in PROCESSES:
        many = switched(budget.config, "run.processes", processes)
        within = switched(switched(many, "run.processes", min(processes, OF_MACHINE)), "run.sharding", "fsdp2")
        forms = [many] if processes == 1 else [switched(many, "run.sharding", "fsdp2"), within]
        totals = [max(at(replace(budget, config=each).phases(), ALONE), key=lambda p: p.total) for each in forms]
        found.append(" / ".join(f"{phase.total / GIB:.0f} ({phase.name})" for phase in totals))
    return found


def main(names: list[str]) -> int:
    """Print the rows."""
    heads = ["model", "trained", *(f"{n} GPUs" if n > 1 else "1 GPU" for n in PROCESSES)]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    with tempfile.TemporaryDirectory() as folder:
        for name in names or NAMES:
            for full in (False, True):
                settings = settings_of(name, full=full, folder=Path(folder))
                with KINDS[settings.kind].budget.budget_of(settings) as budget:
                    cells = [f"`{name}`", "all" if full else "a LoRA", *sizes(budget)]
                    print(f"| {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
