"""Requests to an engine: rollouts, adapters and checksums, each within its time, its answers bounded and checked.

The paths are those of sgl-project/sglang, python/sglang/multimodal_gen/runtime/entrypoints: post_training/rollout_api.py at
078e5e2a, post_training/weights_api.py and openai/common_api.py at 0730031c.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowgrpo.schema.engine import Engine
from flowgrpo_engine.flow import wire
from flowgrpo_engine.service import EngineError, Service, naming

ROLLOUT = "/rollout/generate"

Request = Mapping[str, Any]


class Client:
    """One engine, or several that take turns.

    Args:
        section: `run.engine`.

    Attributes:
        urls: of the engines.
        place: where rollouts are asked for, in errors.

    Raises:
        InputError: an address is not valid, or the variable with the key is not set.
    """

    def __init__(self, section: Engine):
        self._service = Service(section)
        self.urls, self.place = self._service.urls, self._service.place(ROLLOUT)

    def greet(self) -> None:
        """Ask each engine for its adapters, before anything expensive happens.

        Raises:
            InputError: one is not there, or takes no adapters.
        """
        self._service.greet(self.active)

    def rollouts(self, requests: Sequence[Request], most_bytes: int) -> list[list[dict[str, Any]]]:
        """The samples of each request, some of which are under way at once.

        Args:
            most_bytes: of the answer with one sample.

        Raises:
            EngineError: one was not answered in its time, or with something else than so many samples.
        """

        def asked(request: Request) -> list[dict[str, Any]]:
            count = request["num_outputs_per_prompt"]
            content = self._service.ask("POST", ROLLOUT, json=dict(request), most_bytes=count * most_bytes)
            with naming(self.place):
                return wire.samples(content, count)

        return self._service.together(asked, requests)

    def set_adapters(self, url: str, files: Mapping[str, tuple[str, str]]) -> None:
        """Merge adapters into the networks of an engine.

        Args:
            files: by the name of each network, the nickname of its adapters and the path of their file.
        """
        names, paths = zip(*files.values(), strict=True)
        one = len(files) == 1  # several files are lists, of which earlier states of the engine know nothing
        body = {
            "lora_nickname": names[0] if one else names,
            "lora_path": paths[0] if one else paths,
            "target": next(iter(files)) if one else list(files),
            "strength": 1.0,
            "merge_mode": "merge",  # what is not merged stands in no checksum
        }
        self._done(url, "/v1/set_lora", body)

    def remove_adapters(self, url: str) -> None:
        """Take all adapters out of the networks of an engine; where there are none, nothing happens."""
        self._done(url, "/v1/unmerge_lora_weights", {"target": "all"})

    def active(self, url: str, deadline: float | None = None) -> dict[str, list[str]]:
        """The nicknames of the adapters in use, by network.

        Args:
            deadline: see `Endpoint.ask`.
        """
        found = self._service.json(url, "GET", "/v1/list_loras", deadline=deadline).get("active")
        with naming(f"{url}/v1/list_loras"):
            if not isinstance(found, dict):
                raise EngineError("answered without a map of what is active")
            named = {}
            for network, entries in found.items():
                if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
                    raise EngineError("answered with something else than lists of adapters")
                named[network] = [str(each.get("nickname")) for each in entries]
            return named

    def checksums(self, url: str, networks: Sequence[str]) -> dict[str, str]:
        """The checksums of the weights of networks, as they stand in an engine."""
        path = "/get_weights_checksum"
        found = self._service.json(url, "POST", path, json={"module_names": list(networks)})
        with naming(url + path):
            for network in networks:
                if not isinstance(found.get(network), str) or found[network] == "not_found":
                    raise EngineError(f"knows no network {network!r}")
        return {network: found[network] for network in networks}

    def _done(self, url: str, path: str, body: Mapping[str, Any]) -> None:
        status = self._service.json(url, "POST", path, json=dict(body)).get("status")
        if status != "ok":
            raise EngineError(f"{url}{path} answered with the status {str(status)[:80]!r}, not 'ok'")
