"""What a run has left in its folder, as far as two runs of one config must agree on it, and damage to its checkpoints."""

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from runs import from_shards, weights

KINDS = ("flip", "cut", "empty", "zero", "delete", "noise")
UNLIKE = ("time/", "memory/")  # beginnings of metrics that no two runs share


def left(folder: Path) -> dict[str, Any]:
    """Return metrics without times, in the order of steps, the manifest of samples, and the last checkpoint."""
    last = max((folder / "checkpoints").glob("step-*"))
    state = json.loads((last / "state.json").read_text())
    lines = sorted(_lines(folder / "metrics.jsonl"), key=lambda line: line["step"])
    return {
        "metrics": [{k: v for k, v in line.items() if not k.startswith(UNLIKE)} for line in lines],
        "samples": _lines(folder / "samples" / "manifest.jsonl"),
        "last": last.name,
        "state": {key: value for key, value in state.items() if key not in ("files", "digest")},
        "weights": weights(folder, int(last.name.removeprefix("step-"))),
        "shards": from_shards(last),
        **{name: torch.load(last / f"{name}.pt", weights_only=True) for name in ("optimizer", "random")},
    }


def difference(one: Any, other: Any, place: str = "") -> str | None:
    """Say where two results of `left` differ first; None if they are the same to the last bit."""
    if type(one) is not type(other):
        return f"{place}: {type(one).__name__} and {type(other).__name__}"
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return f"{place}: keys {sorted(map(str, one.keys() ^ other.keys()))}"
        return next((d for key in one if (d := difference(one[key], other[key], f"{place}/{key}"))), None)
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return f"{place}: {len(one)} and {len(other)} long"
        pairs = enumerate(zip(one, other, strict=True))
        return next((d for i, pair in pairs if (d := difference(*pair, f"{place}/{i}"))), None)
    if isinstance(one, torch.Tensor):
        return None if torch.equal(one, other) else f"{place}: tensors differ"
    same = one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(other))
    return None if same else f"{place}: {one} and {other}"


def content(folder: Path) -> dict[str, bytes]:
    """Read every file of a folder but its lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def damage(folder: Path, drawn: random.Random) -> tuple[str, str]:
    """Damage a random file of a random checkpoint; return the checkpoint's name and what was done."""
    checkpoint = drawn.choice(sorted(folder.glob("step-*")))
    file = drawn.choice(sorted(checkpoint.iterdir()))
    kind = drawn.choice(KINDS) if file.stat().st_size else "delete"
    written = bytearray(file.read_bytes())
    at = drawn.randrange(len(written)) if written else 0
    if kind == "flip":
        written[at] ^= 1 << drawn.randrange(8)
    elif kind == "cut":
        del written[at:]
    elif kind == "empty":
        written.clear()
    elif kind == "zero":  # a block that was never written
        end = min(len(written), at + 512)
        if not any(written[at:end]):
            kind, written[at] = "flip", 1
        else:
            written[at:end] = bytes(end - at)
    elif kind == "noise":
        written += drawn.randbytes(1 + drawn.randrange(64))
    if kind == "delete":
        file.unlink()
    else:
        file.write_bytes(written)
    return checkpoint.name, f"{kind} {checkpoint.name}/{file.name} at {at}"


def restore(copy: Path, folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
