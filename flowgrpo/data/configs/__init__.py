"""Configs for real models that come with the package: `flowgrpo train NAME` uses one, `flowgrpo init NAME` writes it.

The comment at the top of each says, on lines of these labels, what it is for: `GPU`, `Hub` and `Checked`. A name may be cut
short after a word where no other begins so (`hunyuan`), and `SHORT` says which config the name of a family alone means.
"""

from __future__ import annotations

from pathlib import Path

from flowgrpo.errors import InputError
from rewards.base import nearest

LABELS = ("GPU", "Hub", "Checked")
FOLDER = Path(__file__).parent
SHORT = {  # what the name of a family means
    "sd35": "sd35-medium",
    "flux1": "flux1-dev",
    "flux2": "flux2-dev",
    "flux2-klein": "flux2-klein-4b",
    "wan21": "wan21-1.3b",
    "wan22": "wan22-5b",
    "llada": "llada-8b",
}


def names() -> list[str]:
    """The names of all built-in configs."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def whole(name: str) -> str:
    """The name of the built-in config that `name` is, or is short for.

    Raises:
        InputError: it is short for none or for several.
    """
    if name in names():
        return name
    meant = [SHORT[name]] if name in SHORT else _begun(name)
    if not meant:
        raise InputError(f"there is no built-in config {name!r}, {nearest(name, [*names(), *SHORT])}")
    if len(meant) > 1:
        raise InputError(f"{name!r} is short for several built-in configs: {', '.join(meant)}")
    return meant[0]


def place_of(path: str | Path) -> Path:
    """The file of a built-in config, by its name or a short one; any other path, and a file that exists, as it is.

    Raises:
        InputError: the name is short for several.
    """
    name = str(path)
    if Path(path).is_file() or not (name in SHORT or _begun(name)):
        return Path(path)
    return FOLDER / f"{whole(name)}.yaml"


def _begun(name: str) -> list[str]:
    """The built-in configs whose first words a name is."""
    words = name.rstrip("-")
    return [known for known in names() if words and f"{known}-".startswith(f"{words}-")]


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
