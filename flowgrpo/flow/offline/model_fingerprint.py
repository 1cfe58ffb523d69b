"""Fingerprints, which identify the model of stored samples without loading it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from flowgrpo.data.embedded import place_of
from flowgrpo.flow.pipeline.loading import load
from flowgrpo.training.model_files.hub_files import one_sentence

READ = 1 << 16  # bytes hashed at each end of a file


def fingerprint(path: str, variant: str | None = None) -> str:
    """Return a text that identifies a model: a digest of a folder's files, or the commit of a hub model.

    The digest covers the name, the size and both ends of each file, not hundreds of GiB of weights. A hub model and its
    copy in a folder have different fingerprints. Raise InputError if there is no such model.
    """
    components = sorted(name for name in load.index_of(path) if not name.startswith("_"))
    folder = Path(place_of(path))
    if not folder.is_dir():
        import huggingface_hub

        with one_sentence(path):
            index = huggingface_hub.hf_hub_download(path, "model_index.json")
        of_variant = "" if variant is None else f":{variant}"
        return f"{path}@{Path(index).parent.name}{of_variant}"  # snapshot folders are named by commit
    digest = hashlib.sha256(b"" if variant is None else f"variant {variant}\n".encode())
    files = [folder / "model_index.json", *(file for name in components for file in sorted((folder / name).rglob("*")))]
    for file in files:
        if file.is_file():
            size = file.stat().st_size
            digest.update(f"{file.relative_to(folder)} {size}\n".encode())
            with file.open("rb") as opened:
                digest.update(opened.read(READ))
                opened.seek(max(0, size - READ))
                digest.update(opened.read(READ))
    return f"sha256:{digest.hexdigest()}"
