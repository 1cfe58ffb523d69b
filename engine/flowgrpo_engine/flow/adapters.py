"""Push a flow model's adapters to engines as files, and verify by checksums that they were merged.

An engine reads no alpha from a file's header (pipelines_core/lora/pipeline.py of sgl-project/sglang at 013aa626: the default
alpha of a layer is its rank), so alpha / rank is multiplied into the matrices. It finds layers by their names alone, so each
network has its own file. It caches adapters by nickname, so each version has a new one. It silently skips names that it does
not know, so checksums are compared before and after.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.training.weights.trained_weights import Weights
from flowgrpo_engine.flow.client import Client
from flowgrpo_engine.pushes import Pushes, Tensors
from flowgrpo_engine.service import KEY, EngineError

NETWORKS = ("transformer", "transformer_2")  # an engine's names of the networks that take adapters
PREFIX = "transformer."  # diffusers' prefix of layer names in a file


class Adapters(Pushes):
    """Pushes of a flow model's adapters; arguments and errors as of `Pushes`, and

    Args:
        client: client of the engines.
    """

    suffix = ".safetensors"

    def __init__(self, client: Client, weights: Weights, folder: Path, name: str):
        others = [network for network in weights.modules if network not in NETWORKS]
        if others:
            raise InputError(f"{KEY}: an engine takes adapters of {' and '.join(NETWORKS)}, not of {others[0]}")
        super().__init__(client.urls, weights, folder, name)
        self.client = client
        self._wrapped: set[str] = set()  # engines that have renamed their layers; see `_set`
        self._checksums: dict[str, dict[str, str]] = {}  # url -> network -> checksum after the last push

    @override
    def release(self) -> None:
        super().release()
        self._checksums = {}

    @override
    def _active(self, url: str) -> dict[str, list[str]]:
        return self.client.active(url)

    @override
    def _remove(self, url: str) -> None:
        self.client.remove_adapters(url)

    @override
    def _set(self, url: str, files: Mapping[str, tuple[str, str]]) -> None:
        """Merge the adapters into one engine, and compare the checksums of its networks before and after.

        Checksums include the layers' names, and an engine renames layers when it first wraps them. So the first time,
        adapters are merged and removed once: then the names are the same before and after.
        """
        client = self.client
        client.remove_adapters(url)
        if not files:
            self._checksums.pop(url, None)
            return
        if url not in self._wrapped:
            client.set_adapters(url, files)
            client.remove_adapters(url)
            self._wrapped.add(url)
        before = client.checksums(url, list(files))
        client.set_adapters(url, files)
        after = client.checksums(url, list(files))
        for network, (nickname, _) in files.items():
            moved = nickname != (self.named or {}).get(network)
            last = self._checksums.get(url, {}).get(network) if moved else None
            if after[network] in (before[network], last):
                raise EngineError(
                    f"{url} answered that it merged {nickname}, but the checksum of its {network} did not change; "
                    "it may have none of the layers of these adapters"
                )
        self._checksums[url] = after

    @override
    def _tensors(self) -> dict[str, Tensors]:
        """Return the matrices of each network, scaled so that alpha equals the rank; float32, on the host."""
        tensors = {}
        for network, module in self.weights.modules.items():
            state = {}
            for key, tensor in self.weights.adapter_state(network).items():
                path, _, matrix = key.rpartition(".lora_")
                layer: Any = module.get_submodule(path)  # of peft
                scale = layer.scaling["default"] if matrix == "B.weight" else 1.0
                state[key] = (tensor.detach().float().cpu() * scale).contiguous()
            tensors[network] = state
        return tensors

    @override
    def _write(self, file: Path, tensors: Tensors) -> None:
        """Write a file with diffusers' names and without alpha, which then defaults to the rank."""
        partial = file.with_name(f".{file.name}.partial")
        save_file({PREFIX + key: tensor for key, tensor in tensors.items()}, partial, {"format": "pt"})
        partial.replace(file)
