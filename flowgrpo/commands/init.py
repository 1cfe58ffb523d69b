"""Built-in configs, listed and written to files for editing."""

from __future__ import annotations

from pathlib import Path

from flowgrpo.data import configs
from flowgrpo.errors import InputError
from flowgrpo.training.run import run_folder


def listed() -> list[dict[str, str]]:
    """One row for each built-in config: its name, what it is about, and what its labels say."""
    return [{"name": name, **configs.head(name)} for name in configs.names()]


def lines() -> list[str]:
    """The same for people: a line with the name, and below it, set in, one for what it is about and one for each label."""
    said = []
    for row in listed():
        name, about, *labelled = row.items()
        said += [name[1], f"  {about[1]}", *(f"  {label + ':':8} {words}" for label, words in labelled)]
    return said


def write(name: str, out: Path | None) -> Path:
    """Write a built-in config to a file, by default `NAME.yaml` in this folder, and return the file.

    Args:
        name: its name, or a short one.

    Raises:
        InputError: there is no such config or several, or the file exists or cannot be written.
    """
    name = configs.whole(name)
    file = out or Path(f"{name}.yaml")
    if file.exists():
        place, remedy = (f"--out {file}", "choose another file") if out else (file, "write to another with --out FILE")
        raise InputError(f"{place}: is there already, {remedy}")
    run_folder.check_writable(file.parent, "--out" if out else str(file))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text((configs.FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    return file
