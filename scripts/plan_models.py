"""Plan the memory of every built-in config on the GPU that it is for; prints the table of docs/real_models.md.

    HF_HUB_OFFLINE=1 python scripts/plan_models.py [NAME ...]

Nothing is downloaded. A minute for each config, of which a few give their row at once. Where a config's prompts are a corpus
that has to be fetched, a prompt as long as its longest stands in.
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
from flowgrpo.commands.kinds import KINDS
from flowgrpo.data import configs

GIB = 2**30
LONGEST = 1000  # letters of GSM8K's longest questions, about
HEADS = ("config", "GPU", "encode", "rollout", "decode", "update", "rollout_batch", "micro_batch")


def gpu_of(name: str) -> int:
    """GB of the GPU that a built-in config says it is for."""
    return int(re.match(r"one of (\d+) GB", configs.head(name)["GPU"]).group(1))


def planned(name: str, folder: Path) -> dict[str, Any]:
    """What `flowgrpo plan NAME --gpu-memory` says of a built-in config.

    Args:
        folder: for the stand-in of a corpus.
    """
    overrides = []
    if config.load(name).prompts.train.startswith("gsm8k:"):
        for split in ("train", "test"):
            row = {"question": "a" * LONGEST, "answer": "#### 1"}
            (folder / "gsm8k").mkdir(exist_ok=True)
            (folder / "gsm8k" / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
        overrides = [f"prompts.folder={folder}"]
    settings = config.load(name, overrides)
    return KINDS[settings.kind].budget.fit(settings, gpu_of(name) * GIB)


def row(name: str, found: dict[str, Any]) -> str:
    """A config's row of the table: GiB of each phase with the rows of its calls, and the largest calls that fit."""
    sizes = {phase["phase"]: f"{phase['total'] / GIB:.1f} ({phase['rows']})" for phase in found["phases"]}
    phases = (sizes.get(phase, "") for phase in HEADS[2:6])
    largest = (str(found["largest"][f"train.{key}"]) for key in HEADS[6:])
    return f"| {' | '.join((f'`{name}`', f'{gpu_of(name)} GB', *phases, *largest))} |"


def main(names: list[str]) -> int:
    """Print the rows; the status is 1 if a config does not fit its GPU."""
    short = []
    print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}")
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
