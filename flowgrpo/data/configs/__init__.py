"""Built-in configs for real models: `flowgrpo train NAME` uses one, `flowgrpo init NAME` writes it.

The comment at the top of each has lines labelled `GPU`, `Hub` and `Checked`. A name may be abbreviated at a word
boundary if unambiguous (`hunyuan`); `SHORT` resolves names of families.
"""

from __future__ import annotations

from pathlib import Path

from flowgrpo.errors import InputError
from rewards.base import nearest

LABELS = ("GPU", "Hub", "Checked")
FOLDER = Path(__file__).parent
SHORT = {
    "sd35": "sd35-medium",
    "flux1": "flux1-dev",
    "flux2": "flux2-dev",
    "flux2-klein": "flux2-klein-4b",
    "wan21": "wan21-1.3b",
    "wan22": "wan22-5b",
    "llada": "llada-8b",
}


def names() -> list[str]:
    """Return the names of all built-in configs."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def whole(name: str) -> str:
    """Return the full name of a built-in config. Raises InputError if the name is unknown or ambiguous."""
    if name in names():
        return name
    meant = [SHORT[name]] if name in SHORT else _completions(name)
    if not meant:
        raise InputError(f"there is no built-in config {name!r}, {nearest(name, names())}")
    if len(meant) > 1:
        raise InputError(f"{name!r} is short for several built-in configs: {', '.join(meant)}")
    return meant[0]


def place_of(path: str | Path) -> Path:
    """Return the file of a built-in config; other paths unchanged. Raises InputError if the name is ambiguous."""
    name = str(path)
    if Path(path).is_file() or not (name in SHORT or _completions(name)):
        return Path(path)
    return FOLDER / f"{whole(name)}.yaml"


def _completions(name: str) -> list[str]:
    words = name.rstrip("-")
    return [known for known in names() if words and f"{known}-".startswith(f"{words}-")]


def is_built_in(file: Path) -> bool:
    """Return whether a file is one of the built-in configs."""
    return file.resolve().parent == FOLDER.resolve()


def head(name: str) -> dict[str, str]:
    """Return the top comment of a built-in config: its first sentence as `about`, and the text of each label."""
    texts, label = {"about": ""}, "about"
    for line in (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        words = line.removeprefix("#").strip()
        start, colon, rest = words.partition(":")
        if not words:
            label = ""
        elif colon and start in LABELS:
            label, texts[start] = start, rest.strip()
        elif label:
            texts[label] = f"{texts[label]} {words}".strip()
    return texts
