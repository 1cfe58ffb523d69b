"""Plan the memory of every built-in config on the GPU that it is for; prints the table of docs/research/configs.md.

    HF_HUB_OFFLINE=1 python research/plan_models.py [NAME ...]

Nothing is downloaded. Each config takes 4 to 60 seconds of one core. If a config's prompts are a corpus that would have
to be downloaded, a prompt as long as its longest replaces them.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from flowgrpo import config
from flowgrpo.commands.model_kinds import KINDS
from flowgrpo.data import configs

GIB = 2**30
OFFERED = {24: 23.6, 48: 44.5, 80: 79.0}  # GiB that a card of so many GB offers
LONGEST = 1000  # letters of GSM8K's longest questions, approximately
PHASES = ("encode", "rollout", "decode", "reward", "update", "evaluate")
KEYS = ("rollout_batch", "micro_batch")


def gpu_of(name: str) -> int:
    """Return the GB of the GPU that a built-in config names."""
    return int(re.match(r"one of (\d+) GB", configs.head(name)["GPU"]).group(1))


def room_of(name: str) -> float:
    """Return the GiB that the GPU of a built-in config offers."""
    return OFFERED[gpu_of(name)]


def stand_in(name: str, folder: Path) -> list[str]:
    """Write a replacement for a config's corpus to a folder, if it needs one, and return the overrides that select it."""
    if not config.load(name).prompts.train.startswith("gsm8k:"):
        return []
    for split in ("train", "test"):
        row = {"question": "a" * LONGEST, "answer": "#### 1"}
        (folder / "gsm8k").mkdir(exist_ok=True)
        (folder / "gsm8k" / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    return [f"prompts.folder={folder}"]


def planned(name: str, folder: Path) -> dict[str, Any]:
    """Return the result of `flowgrpo plan NAME --gpu-memory` for a built-in config.

    Args:
        folder: folder for the replacement of a corpus.
    """
    settings = config.load(name, stand_in(name, folder))
    return KINDS[settings.kind].budget.fit(settings, int(room_of(name) * GIB))


def row(name: str, found: dict[str, Any]) -> str:
    """Return a config's row: GiB of each phase with the rows of its calls, and the largest batch sizes that fit."""
    sizes = {phase["phase"]: f"{phase['total'] / GIB:.1f} ({phase['rows']})" for phase in found["phases"]}
    phases = (sizes.get(phase, "") for phase in PHASES)
    largest = (str(found["largest"][f"train.{key}"]) for key in KEYS)
    return f"| {' | '.join((f'`{name}`', f'{gpu_of(name)} GB', *phases, *largest))} |"


def main(names: list[str]) -> int:
    """Print the table; return 1 if a config does not fit its GPU, else 0."""
    short = []
    heads = ("config", "GPU", *PHASES, *KEYS)
    print(", ".join(f"{size} GB offer {offered} GiB" for size, offered in OFFERED.items()) + ".\n")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    with tempfile.TemporaryDirectory() as folder:
        for name in names or configs.names():
            started = time.process_time()
            found = planned(name, Path(folder))
            print(row(name, found), flush=True)
            print(f"{name}: {time.process_time() - started:.0f} CPU seconds", file=sys.stderr)
            short += [] if found["fits"] else [name]
    if short:
        print(f"do not fit: {', '.join(short)}", file=sys.stderr)
    return bool(short)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
