"""Rewards served over HTTP, for runs in other environments or on other machines."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from flowgrpo import config
from flowgrpo.commands.terminal import out
from flowgrpo.data import yaml_maps
from flowgrpo.errors import InputError

PACKAGES = ("uvicorn", "starlette", "h11")  # of the extra `serve`


def check_packages(command: str) -> None:
    """Refuse a command that serves where the packages of servers are not installed.

    Raises:
        InputError: one is not.
    """
    for package in PACKAGES:
        if find_spec(package) is None:
            raise InputError(f"flowgrpo {command} needs the package {package}: pip install 'flowgrpo[serve]'")


def serve(
    uses: Sequence[str],
    *,
    host: str,
    port: int,
    token_env: str | None,
    batch_size: int,
    max_bytes: int,
    device: str | None,
) -> None:
    """Serve rewards until interrupted, and print the address of each.

    Args:
        uses: rewards as a config uses them, or maps in YAML with `use` and `options`.
        host: the address to listen on.
        port: there; 0 takes a free one.
        token_env: an environment variable with a token to ask for.
        batch_size: samples up to which waiting requests are joined.
        max_bytes: largest request.
        device: where rewards compute; by default the first GPU, if there is one.

    Raises:
        InputError: a reward is written wrongly, or the packages of the server are not installed.
        RewardError: a reward cannot be had, or the address cannot be listened on.
        KeyboardInterrupt: it was interrupted.
    """
    written = [yaml_maps.parse_yaml(text, "REWARD") if text.startswith("{") else text for text in uses]
    settings = config.validated({"model": {"path": "shapes"}, "rewards": written})
    for use in settings.rewards:
        for key in ("only", "weight"):
            if key in use.model_fields_set:
                raise InputError(
                    f"{use.use}: {key} belongs into the config of the run, a server scores what it is sent"
                )
    check_packages("serve")
    from rewards import load
    from rewards.compute import default_device
    from rewards.served import guard, server

    token = None if token_env is None else server.token_of(token_env)
    listening = guard.listen(host, port, token)
    device = device or default_device()
    served = [load(use.use, use.weight, use.options, use.name) for use in settings.rewards]
    for reward in served:
        reward.to(device)
    application = server.app(served, token, batch_size=batch_size, max_bytes=max_bytes, device=device)
    host = f"[{host}]" if ":" in host else host
    for reward in served:
        out.print(f"{reward.name}  http://{host}:{listening.getsockname()[1]}/{reward.name}", soft_wrap=True)
    server.run(application, listening)
