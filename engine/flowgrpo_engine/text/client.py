"""Client of an engine of texts: completions with their step maps, and adapters.

The paths and fields are SGLang's (sgl-project/sglang, python/sglang/srt): `/generate` with `input_ids`, `sampling_params`,
`lora_path` and `return_logprob`, answered by `output_ids` and `meta_info`, `/load_lora_adapter` and `/unload_lora_adapter`
(managers/io_struct.py), `/v1/models`, which names adapters (entrypoints/http_server.py). Its diffusion language models
(`--dllm-algorithm`) supported this much of it in November 2026:

 - step maps: in no release. The open pull request 27943 (of 2026-06-11) takes `return_step_maps` and answers
   `meta_info["step_maps"]`, a step from 1 for each token, anew in each block. 17297 (of 2026-01-18, after dInfer) was
   closed.
 - log-probabilities: none for LowConfidence. Gemma4Renoise has them at its last step (srt/dllm/README.md at 7257636f).
 - seeds: `sampling_seed` needs deterministic inference, which is refused there (srt/dllm/sampling.py at 0026bd4d).
 - adapters: turned off with a warning (`handle_dllm_inference`, which sets `enable_lora` to False).

So this is the smallest exchange that a patched engine, or a server with its own decoder, can answer:
docs/research/engines.md. Not tested against a real engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowgrpo.schema.engine import Engine
from flowgrpo_engine.service import EngineError, Service, naming, parse

GENERATE, MODELS = "/generate", "/v1/models"

Request = Mapping[str, Any]


class Client:
    """Client of one engine of texts, or of several that take turns.

    Args:
        section: `run.engine`.

    Attributes:
        urls: addresses of the engines.
        place: addresses and path of completions, for errors.

    Raises:
        InputError: an address is not valid, or the variable with the key is not set.
    """

    def __init__(self, section: Engine):
        self._service = Service(section)
        self.urls, self.place = self._service.urls, self._service.place(GENERATE)

    def greet(self) -> None:
        """Ask each engine for its models, before anything expensive happens.

        Raises:
            InputError: an engine does not answer, or is none.
        """
        self._service.greet(self.adapters)

    def completions(self, requests: Sequence[Request], most_bytes: int) -> list[list[dict[str, Any]]]:
        """Return the completions of each request, one per prompt; several requests run at once.

        Args:
            most_bytes: largest size of a completion.

        Raises:
            EngineError: a request was not answered in time, or with another number of completions.
        """

        def ask(request: Request) -> list[dict[str, Any]]:
            count = len(request["input_ids"])
            answer = parse(self._service.ask("POST", GENERATE, json=dict(request), most_bytes=count * most_bytes))
            with naming(self.place):
                if not isinstance(answer, list) or not all(isinstance(each, dict) for each in answer):
                    raise EngineError("did not answer with a list of completions")
                if len(answer) != count:
                    raise EngineError(f"answered with {len(answer)} completions instead of {count}")
            return answer

        return self._service.together(ask, requests)

    def adapters(self, url: str, deadline: float | None = None) -> dict[str, str]:
        """Return the adapters that an engine has loaded: name -> path.

        Args:
            deadline: see `Endpoint.ask`.
        """
        models = self._service.json(url, "GET", MODELS, deadline=deadline).get("data")
        with naming(f"{url}{MODELS}"):
            if not isinstance(models, list) or not all(isinstance(each, dict) for each in models):
                raise EngineError("answered without a list of its models")
        return {str(each.get("id")): str(each.get("root")) for each in models if each.get("parent") is not None}

    def load_adapter(self, url: str, name: str, path: str) -> None:
        """Let an engine load an adapter from a folder that it can read."""
        self._done(url, "/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def unload_adapter(self, url: str, name: str) -> None:
        """Let an engine unload an adapter."""
        self._done(url, "/unload_lora_adapter", {"lora_name": name})

    def _done(self, url: str, path: str, body: Mapping[str, Any]) -> None:
        answer = self._service.json(url, "POST", path, json=dict(body))
        if answer.get("success") is not True:
            why = " ".join(str(answer.get("error_message") or "no success").split())
            raise EngineError(f"{url}{path} answered that it did not: {why[:200]}")
