"""Push a language model's adapters to engines: folders in peft's format, which an engine loads under a name.

Each request names the adapter to use, so an engine may serve several runs; it refuses a name that it does not know. Engines
of texts report no checksums. Whether an engine applied all layers shows only in `engine/mean_abs_log_ratio`, if it sends
log-probabilities.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from typing_extensions import override

from flowgrpo.training.weights.trained_weights import Weights
from flowgrpo_engine.pushes import Pushes, Tensors
from flowgrpo_engine.service import EngineError
from flowgrpo_engine.text.client import Client

NETWORK = "model"  # its name in `Weights`


class Adapters(Pushes):
    """Pushes of a language model's adapters; arguments and errors as of `Pushes`, and

    Args:
        client: client of the engines.
        write: writes the current adapter to a folder, in peft's format.
    """

    suffix = ""

    def __init__(self, client: Client, weights: Weights, folder: Path, name: str, *, write: Callable[[Path], object]):
        super().__init__(client.urls, weights, folder, name)
        self.client, self.write_adapter = client, write

    @property
    def pushed(self) -> str | None:
        """Name of the adapter that requests ask for; None if the adapters do not change the model."""
        return (self.named or {}).get(NETWORK)

    @override
    def _tensors(self) -> dict[str, Tensors]:
        state = self.weights.adapter_state(NETWORK)
        return {NETWORK: {key: tensor.detach().float().cpu().contiguous() for key, tensor in state.items()}}

    @override
    def _write(self, file: Path, tensors: Tensors) -> None:
        partial = file.with_name(f".{file.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        self.write_adapter(partial)
        shutil.rmtree(file, ignore_errors=True)  # left by a run that was killed; it has the same numbers
        partial.replace(file)

    @override
    def _set(self, url: str, files: Mapping[str, tuple[str, str]]) -> None:
        """Unload earlier versions, since an engine holds few, and load the new one unless it is loaded."""
        loaded, wanted = self.client.adapters(url), dict(files.values())
        for name, path in wanted.items():
            if loaded.get(name) not in (None, path):
                raise EngineError(
                    f"{url} has {name} from {loaded[name]}, not from {path}; check that it sees the same folder"
                )
        for name in filter(self.ours, loaded.keys() - wanted.keys()):
            self.client.unload_adapter(url, name)
        for name, path in wanted.items():
            if name not in loaded:
                self.client.load_adapter(url, name, path)

    @override
    def _active(self, url: str) -> dict[str, list[str]]:
        versions = sorted(filter(self.ours, self.client.adapters(url)))
        return {NETWORK: versions} if versions else {}

    @override
    def _remove(self, url: str) -> None:
        for name in filter(self.ours, self.client.adapters(url)):
            self.client.unload_adapter(url, name)
