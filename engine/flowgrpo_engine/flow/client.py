"""Client of an engine of flow models: rollouts, adapters and checksums, with time limits and checked answers.

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
    """Client of one engine, or of several that take turns.

    Args:
        section: `run.engine`.

    Attributes:
        urls: addresses of the engines.
        place: addresses and path of rollouts, for errors.

    Raises:
        InputError: an address is not valid, or the variable with the key is not set.
    """

    def __init__(self, section: Engine):
        self._service = Service(section)
        self.urls, self.place = self._service.urls, self._service.place(ROLLOUT)

    def greet(self) -> None:
        """Ask each engine for its adapters, before anything expensive happens.

        Raises:
            InputError: an engine does not answer, or takes no adapters.
        """
        self._service.greet(self.active)

    def rollouts(self, requests: Sequence[Request], most_bytes: int) -> list[list[dict[str, Any]]]:
        """Return the samples of each request; several requests run at once.

        Args:
            most_bytes: largest size of an answer, per sample.

        Raises:
            EngineError: a request was not answered in time, or with another number of samples.
        """

        def ask(request: Request) -> list[dict[str, Any]]:
            count = request["num_outputs_per_prompt"]
            content = self._service.ask("POST", ROLLOUT, json=dict(request), most_bytes=count * most_bytes)
            with naming(self.place):
                return wire.samples(content, count)

        return self._service.together(ask, requests)

    def set_adapters(self, url: str, files: Mapping[str, tuple[str, str]]) -> None:
        """Merge adapters into the networks of an engine.

        Args:
            files: network -> nickname of its adapters, path of their file.
        """
        names, paths = zip(*files.values(), strict=True)
        one = len(files) == 1  # lists only for several files: earlier versions of the engine do not know them
        body = {
            "lora_nickname": names[0] if one else names,
            "lora_path": paths[0] if one else paths,
            "target": next(iter(files)) if one else list(files),
            "strength": 1.0,
            "merge_mode": "merge",  # checksums cover merged adapters only
        }
        self._done(url, "/v1/set_lora", body)

    def remove_adapters(self, url: str) -> None:
        """Remove all adapters from the networks of an engine, if there are any."""
        self._done(url, "/v1/unmerge_lora_weights", {"target": "all"})

    def active(self, url: str, deadline: float | None = None) -> dict[str, list[str]]:
        """Return the nicknames of the adapters in use, by network.

        Args:
            deadline: see `Endpoint.ask`.
        """
        active = self._service.json(url, "GET", "/v1/list_loras", deadline=deadline).get("active")
        with naming(f"{url}/v1/list_loras"):
            if not isinstance(active, dict):
                raise EngineError("did not answer which adapters are active")
            named = {}
            for network, entries in active.items():
                if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
                    raise EngineError("did not answer with lists of adapters")
                named[network] = [str(each.get("nickname")) for each in entries]
            return named

    def checksums(self, url: str, networks: Sequence[str]) -> dict[str, str]:
        """Return the checksums of the current weights of an engine's networks."""
        path = "/get_weights_checksum"
        checksums = self._service.json(url, "POST", path, json={"module_names": list(networks)})
        with naming(url + path):
            for network in networks:
                if not isinstance(checksums.get(network), str) or checksums[network] == "not_found":
                    raise EngineError(f"knows no network {network!r}")
        return {network: checksums[network] for network in networks}

    def _done(self, url: str, path: str, body: Mapping[str, Any]) -> None:
        status = self._service.json(url, "POST", path, json=dict(body)).get("status")
        if status != "ok":
            raise EngineError(f"{url}{path} answered with the status {str(status)[:80]!r}, not 'ok'")
