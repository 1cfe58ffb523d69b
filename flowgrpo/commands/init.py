"""`flowgrpo init`: list the built-in configs, or write one to a file for editing."""

from __future__ import annotations

from pathlib import Path

from flowgrpo.data import configs
from flowgrpo.errors import InputError
from flowgrpo.training.run import run_folder


def list_configs() -> list[dict[str, str]]:
    """Return the name, the summary and the labels of each built-in config."""
    return [{"name": name, **configs.head(name)} for name in configs.names()]


def lines() -> list[str]:
    """Return the list of configs as text: each name, and its summary and labels indented below."""
    text = []
    for row in list_configs():
        name, about, *labels = row.items()
        text += [name[1], f"  {about[1]}", *(f"  {label + ':':8} {words}" for label, words in labels)]
    return text


def write(name: str, out: Path | None) -> Path:
    """Write a built-in config to `out`, by default `NAME.yaml` in the working directory, and return the file.

    Raises:
        InputError: no config or several have this name, or the file exists or cannot be written.
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
