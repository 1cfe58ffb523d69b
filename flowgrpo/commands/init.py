"""`flowgrpo init`: list the built-in configs, or write one to a file for editing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowgrpo.commands.terminal import Format, print_json, print_line, say
from flowgrpo.data import configs
from flowgrpo.errors import InputError
from flowgrpo.training.run import run_folder


def init(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="the config to write; without it, all are listed")
    ] = None,
    out_file: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="file to write; by default NAME.yaml in the current folder"),
    ] = None,
    form: Format = "human",
) -> None:
    """List the configs for real models that come with the package, or write one to a file for editing."""
    if name is not None:
        name = configs.whole(name)
        file = str(_write(name, out_file))
        if form == "json":
            print_json({"name": name, "file": file})
        else:
            print_line(file)
        return
    if out_file is not None:
        raise InputError("--out: say which config to write, flowgrpo init lists them")
    rows = {name: configs.head(name) for name in configs.names()}
    if form == "json":
        print_json([{"name": name, **head} for name, head in rows.items()])
        return
    for name, head in rows.items():
        about, *labels = head.items()
        needs = [f"  {label + ':':8} {words}" for label, words in labels if label != "Checked"]  # long; the file has it
        for line in (name, f"  {about[1]}", *needs):
            print_line(line)
    say(
        "flowgrpo init NAME writes a config to a file; flowgrpo plan NAME and flowgrpo train NAME use it unchanged; none "
        "was run on real weights"
    )


def _write(name: str, out: Path | None) -> Path:
    file = out or Path(f"{name}.yaml")
    if file.exists():
        place, remedy = (f"--out {file}", "choose another file") if out else (file, "write to another with --out FILE")
        raise InputError(f"{place}: is there already, {remedy}")
    run_folder.check_writable(file.parent, "--out" if out else str(file))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text((configs.FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    return file
