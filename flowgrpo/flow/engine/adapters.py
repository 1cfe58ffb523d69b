"""Pushes: the adapters as they stand, as files that an engine merges, and the proof that it did.

An engine reads no alpha from a file's header (pipelines_core/lora/pipeline.py of sgl-project/sglang at 013aa626: without an
alpha of its own a layer has that of its rank), so alpha over rank is multiplied into the matrices. It looks adapters up by
their layers alone, so each network has a file of its own. It keeps adapters by nickname, so each version has another. And it
skips names that it does not know without a word, so checksums are compared before and after.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from flowgrpo.errors import InputError
from flowgrpo.flow.engine.client import Client
from flowgrpo.flow.engine.wire import KEY, EngineError
from flowgrpo.training.weights import Weights

NETWORKS = ("transformer", "transformer_2")  # what an engine calls those that take adapters
PREFIX = "transformer."  # diffusers' before the layers of a file

Tensors = dict[str, torch.Tensor]


class Adapters:
    """The adapters of a run, as its engines have them.

    Args:
        client: of the engines.
        weights: whose adapters are pushed.
        folder: where their files lie, seen by the engines under the same path.
        name: of the run, with which nicknames begin.

    Raises:
        InputError: an engine would leave out a part of them.
    """

    def __init__(self, client: Client, weights: Weights, folder: Path, name: str):
        self.client, self.weights, self.folder, self.name = client, weights, folder, name
        others = [network for network in weights.modules if network not in NETWORKS]
        if others:
            raise InputError(f"{KEY}: adapters can be pushed for {' and '.join(NETWORKS)}, not for {others[0]}")
        if any(key.endswith(".bias") for network in weights.modules for key in weights.adapter_state(network)):
            raise InputError("model.lora.path: its adapters have biases, which an engine leaves out; start from others")
        self._named: dict[str, str] | None = None  # the nickname of each network's, as they were pushed last
        self._wrapped: set[str] = set()  # engines whose layers are known to be named as with adapters
        self._checksums: dict[str, dict[str, str]] = {}  # of each engine, after the last push

    def push(self) -> None:
        """Bring the adapters to every engine, if they are others than the last time; delete the files of before.

        Raises:
            EngineError: an engine has not taken them.
        """
        versions = {network: tensors for network, tensors in self._tensors().items() if _acts(tensors)}
        named = {network: f"{self.name}-{network}-{_digest(tensors)}" for network, tensors in versions.items()}
        if named == self._named:
            return self.verify()
        files = {network: self.folder / f"{nickname}.safetensors" for network, nickname in named.items()}
        for network, file in files.items():
            _write(file, versions[network])
        for url in self.client.urls:
            self._set(url, {network: (named[network], str(file.resolve())) for network, file in files.items()})
        self._named = named
        self.verify()
        self._delete_all_but(set(files.values()))

    def verify(self) -> None:
        """Ask every engine whether it still computes with the adapters that were pushed last, and no others.

        Raises:
            EngineError: one does not.
        """
        wanted = {network: [nickname] for network, nickname in (self._named or {}).items()}
        for url in self.client.urls:
            active = self.client.active(url)
            if active != wanted:
                raise EngineError(
                    f"{url} has the adapters {_words(active)}, not those that were pushed, {_words(wanted)}"
                )

    def release(self) -> None:
        """Take the adapters out of every engine."""
        for url in self.client.urls:
            self.client.remove_adapters(url)
        self._named, self._checksums = None, {}

    def _delete_all_but(self, files: set[Path]) -> None:
        """Delete the files of versions before, of this run alone: others may have theirs beside them."""
        ours = re.compile(rf"{re.escape(self.name)}-({'|'.join(NETWORKS)})-[0-9a-f]{{16}}\.safetensors")
        for file in self.folder.iterdir() if self.folder.is_dir() else ():
            if ours.fullmatch(file.name) and file not in files:
                file.unlink()

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
            moved = nickname != (self._named or {}).get(network)
            last = self._checksums.get(url, {}).get(network) if moved else None
            if after[network] in (before[network], last):
                raise EngineError(
                    f"{url} answered that it merged {nickname}, but its {network} has the checksum of before; it may know "
                    "none of the adapters' layers"
                )
        self._checksums[url] = after

    def _tensors(self) -> dict[str, Tensors]:
        """The matrices of each network, scaled so that their alpha is their rank; float32, on the host."""
        found = {}
        for network, module in self.weights.modules.items():
            state = {}
            for key, tensor in self.weights.adapter_state(network).items():
                layer, _, matrix = key.rpartition(".lora_")
                scale = module.get_submodule(layer).scaling["default"] if matrix == "B.weight" else 1.0
                state[key] = (tensor.detach().float().cpu() * scale).contiguous()
            found[network] = state
        return found


def _acts(tensors: Tensors) -> bool:
    """Whether adapters change anything: new ones do not."""
    return any(bool(tensor.any()) for key, tensor in tensors.items() if ".lora_B." in key)


def _digest(tensors: Tensors) -> str:
    """A short name of what adapters are, the same for the same numbers."""
    digest = hashlib.sha256()
    for key in sorted(tensors):
        digest.update(key.encode() + tensors[key].numpy().tobytes())
    return digest.hexdigest()[:16]


def _write(file: Path, tensors: Tensors) -> None:
    """Write adapters as diffusers names them, without an alpha, which then is the rank."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    save_file({PREFIX + key: tensor for key, tensor in tensors.items()}, partial, {"format": "pt"})
    partial.replace(file)


def _words(active: Mapping[str, list[str]]) -> str:
    return ", ".join(f"{network}: {'+'.join(names)}" for network, names in sorted(active.items())) or "none"
