"""`flowgrpo serve`: serve rewards over HTTP for runs in other environments or on other machines."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import typer

from flowgrpo import config
from flowgrpo.commands import options
from flowgrpo.commands.terminal import print_line
from flowgrpo.data import yaml_maps
from flowgrpo.errors import InputError

PACKAGES = ("uvicorn", "starlette", "h11")  # of the extra `serve`


def check_packages(command: str) -> None:
    """Refuse a command that serves pages or rewards if the packages for it are not installed."""
    for package in PACKAGES:
        if find_spec(package) is None:
            raise InputError(f"flowgrpo {command} needs the package {package}: pip install 'flowgrpo[serve]'")


def serve(
    uses: Annotated[
        list[str],
        typer.Argument(
            metavar="REWARD ...",
            help="as in a config: a name, ./file.py:object, or a map such as '{use: ..., options: ...}'",
        ),
    ],
    *,
    port: options.Port = 8100,
    host: Annotated[str, typer.Option("--host", help="address to listen on")] = "127.0.0.1",
    token_env: Annotated[
        str | None,
        typer.Option("--token-env", metavar="NAME", help="environment variable with the token that clients must send"),
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="join waiting requests up to this many samples")
    ] = 64,
    max_mib: Annotated[int, typer.Option("--max-mib", min=1, help="largest request, in MiB")] = 256,
    device: options.Device = None,
) -> None:
    """Serve rewards over HTTP; a run uses them by their URLs."""
    written = [yaml_maps.parse_yaml(text, "REWARD") if text.startswith("{") else text for text in uses]
    settings = config.validate({"model": {"path": "shapes"}, "rewards": written})
    for use in settings.rewards:
        for key in ("only", "weight", "of"):
            if key in use.model_fields_set:
                raise InputError(
                    f"{use.use}: {key} belongs into the config of the run, a server scores what it is sent"
                )
    check_packages("serve")
    from rewards import load
    from rewards.compute import default_device
    from rewards.served import guard, server

    token = None if token_env is None else server.read_token(token_env)
    listening = guard.listen(host, port, token)
    device = device or default_device()
    served = [load(use.use, use.weight, use.options, use.name, frames=use.frames) for use in settings.rewards]
    for reward in served:
        if reward.hears:
            raise InputError(
                f"{reward.name}: a sound does not travel beside its video; serve a reward of the sound alone"
            )
        reward.to(device)
    application = server.app(served, token, batch_size=batch_size, max_bytes=max_mib << 20, device=device)
    host = f"[{host}]" if ":" in host else host
    for reward in served:
        print_line(f"{reward.name}  http://{host}:{listening.getsockname()[1]}/{reward.name}")
    server.run(application, listening)
