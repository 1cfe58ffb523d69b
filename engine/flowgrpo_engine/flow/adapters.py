"""Pushes: the adapters as they stand, as files that an engine merges, and the proof that it did.

An engine reads no alpha from a file's header (pipelines_core/lora/pipeline.py of sgl-project/sglang at 013aa626: without an
alpha of its own a layer has that of its rank), so alpha over rank is multiplied into the matrices. It looks adapters up by
their layers alone, so each network has a file of its own. It keeps adapters by nickname, so each version has another. And it
skips names that it does not know without a word, so checksums are compared before and after.
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

NETWORKS = ("transformer", "transformer_2")  # what an engine calls those that take adapters
PREFIX = "transformer."  # diffusers' before the layers of a file


class Adapters(Pushes):
    """The adapters of a flow model; arguments and errors as of `Pushes`, and

    Args:
        client: of the engines.
    """

    suffix = ".safetensors"

    def __init__(self, client: Client, weights: Weights, folder: Path, name: str):
        others = [network for network in weights.modules if network not in NETWORKS]
        if others:
            raise InputError(f"{KEY}: adapters can be pushed for {' and '.join(NETWORKS)}, not for {others[0]}")
        super().__init__(client.urls, weights, folder, name)
        self.client = client
        self._wrapped: set[str] = set()  # engines whose layers are known to be named as with adapters
        self._checksums: dict[str, dict[str, str]] = {}  # of each engine, after the last push

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

        Checksums are of names, too, and an engine renames layers when it first wraps them. So the first time adapters are
        merged and taken out once: then it holds the same names, and the same adapters, before and after.
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
                    f"{url} answered that it merged {nickname}, but its {network} has the checksum of before; it may know "
                    "none of the adapters' layers"
                )
        self._checksums[url] = after

    @override
    def _tensors(self) -> dict[str, Tensors]:
        """The matrices of each network, scaled so that their alpha is their rank; float32, on the host."""
        found = {}
        for network, module in self.weights.modules.items():
            state = {}
            for key, tensor in self.weights.adapter_state(network).items():
                path, _, matrix = key.rpartition(".lora_")
                layer: Any = module.get_submodule(path)  # of peft
                scale = layer.scaling["default"] if matrix == "B.weight" else 1.0
                state[key] = (tensor.detach().float().cpu() * scale).contiguous()
            found[network] = state
        return found

    @override
    def _write(self, file: Path, tensors: Tensors) -> None:
        """Write them as diffusers names them, without an alpha, which then is the rank."""
        partial = file.with_name(f".{file.name}.partial")
        save_file({PREFIX + key: tensor for key, tensor in tensors.items()}, partial, {"format": "pt"})
        partial.replace(file)
