"""Configs for real models that come with the package: `flowgrpo train NAME` uses one, `flowgrpo init NAME` writes it.

The comment at the top of each says, on lines of these labels, what it is for: `GPU`, `Hub` and `Checked`.
"""

from __future__ import annotations

from pathlib import Path

LABELS = ("GPU", "Hub", "Checked")
FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The names of all built-in configs."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def place_of(path: str | Path) -> Path:
    """The file of a built-in config; any other path, and one that exists, as it is."""
    file = FOLDER / f"{path}.yaml"
    return file if str(path) in names() and not Path(path).exists() else Path(path)


def is_built_in(file: Path) -> bool:
    """Whether a file is one of the built-in configs."""
    return file.resolve().parent == FOLDER.resolve()


def head(name: str) -> dict[str, str]:
    """What the comment at the top of a built-in config says: its first sentence as `about`, and a text for each label."""
    said, label = {"about": ""}, "about"
    for line in (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        words = line.removeprefix("#").strip()
        start, colon, rest = words.partition(":")
        if not words:
            label = ""
        elif colon and start in LABELS:
            label, said[start] = start, rest.strip()
        elif label:
            said[label] = f"{said[label]} {words}".strip()
    return said
