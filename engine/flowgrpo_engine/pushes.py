"""Push a run's adapters to engines as files, and verify that each engine uses them.

The name of a version contains a digest of its numbers, since engines cache adapters by name.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from flowgrpo.errors import InputError
from flowgrpo.training.weights.trained_weights import Weights
from flowgrpo_engine.service import EngineError

Tensors = dict[str, torch.Tensor]


class Pushes(ABC):
    """Base class of pushes of a run's adapters to its engines.

    Args:
        urls: addresses of the engines.
        weights: weights with the adapters.
        folder: folder of the files, which the engines see under the same path.
        name: name of the run, with which the names of versions begin.

    Raises:
        InputError: an engine would leave out a part of the adapters.
    """

    suffix: str  # of a version's file or folder

    def __init__(self, urls: Sequence[str], weights: Weights, folder: Path, name: str):
        self.urls, self.weights, self.folder, self.name = urls, weights, folder, name
        if any(key.endswith(".bias") for network in weights.modules for key in weights.adapter_state(network)):
            raise InputError(
                "model.lora.path: its adapters have biases, which an engine ignores; start from other adapters"
            )
        if shifts := [path for adapter in weights.begun.values() for path in adapter.shifts]:
            raise InputError(
                f"model.lora.path: it shifts {shifts[0]}, which an engine ignores; start from other adapters"
            )
        self.named: dict[str, str] | None = None  # network -> version pushed last; None before the first push

    def push(self) -> None:
        """Push the adapters to every engine if they have changed since the last time; delete the files of older versions.

        Raises:
            EngineError: an engine has not taken the adapters.
        """
        versions = {network: tensors for network, tensors in self._tensors().items() if _have_effect(tensors)}
        named = {network: f"{self.name}-{network}-{_digest(tensors)}" for network, tensors in versions.items()}
        if named == self.named:
            return self.verify()
        files = {network: self.folder / f"{version}{self.suffix}" for network, version in named.items()}
        for network, file in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            self._write(file, versions[network])
        for url in self.urls:
            self._set(url, {network: (named[network], str(file.resolve())) for network, file in files.items()})
        self.named = named
        self.verify()
        self._delete_all_but(set(files.values()))

    def verify(self) -> None:
        """Check that every engine has the adapters that were pushed last, and no others.

        Raises:
            EngineError: an engine has not.
        """
        wanted = {network: [version] for network, version in (self.named or {}).items()}
        for url in self.urls:
            active = self._active(url)
            if active != wanted:
                raise EngineError(
                    f"{url} has the adapters {_words(active)} instead of the ones that the run sent, {_words(wanted)}"
                )

    def release(self) -> None:
        """Remove the adapters from every engine."""
        for url in self.urls:
            self._remove(url)
        self.named = None

    @abstractmethod
    def _tensors(self) -> dict[str, Tensors]:
        """Return the matrices of each network in the form that is pushed; float32, on the host."""

    @abstractmethod
    def _write(self, file: Path, tensors: Tensors) -> None:
        """Write a version of one network's adapters."""

    @abstractmethod
    def _set(self, url: str, files: Mapping[str, tuple[str, str]]) -> None:
        """Let one engine load versions in place of all earlier ones; `files` maps each network to its version and path.

        Raises:
            EngineError: the engine did not.
        """

    @abstractmethod
    def _active(self, url: str) -> dict[str, list[str]]:
        """Return the versions that one engine has, by network."""

    @abstractmethod
    def _remove(self, url: str) -> None:
        """Remove all versions from one engine."""

    def ours(self, text: str) -> bool:
        """Return whether a text is the name of a version of this run."""
        return (
            re.fullmatch(rf"{re.escape(self.name)}-({'|'.join(self.weights.modules)})-[0-9a-f]{{16}}", text) is not None
        )

    def _delete_all_but(self, files: set[Path]) -> None:
        """Delete the files of this run's other versions; other runs may have files in the same folder."""
        for file in self.folder.iterdir() if self.folder.is_dir() else ():
            if file.name.endswith(self.suffix) and self.ours(file.name.removesuffix(self.suffix)) and file not in files:
                shutil.rmtree(file) if file.is_dir() else file.unlink()


def _have_effect(tensors: Tensors) -> bool:
    """Return whether adapters change the model; new ones, with B = 0, do not."""
    return any(bool(tensor.any()) for key, tensor in tensors.items() if ".lora_B." in key)


def _digest(tensors: Tensors) -> str:
    """Return 16 hex digits that identify the numbers of adapters."""
    digest = hashlib.sha256()
    for key in sorted(tensors):
        digest.update(key.encode() + tensors[key].numpy().tobytes())
    return digest.hexdigest()[:16]


def _words(active: Mapping[str, list[str]]) -> str:
    return ", ".join(f"{network}: {'+'.join(names)}" for network, names in sorted(active.items())) or "none"
