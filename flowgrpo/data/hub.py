"""Prompts from datasets of the hub: `hub:owner/name:split` or `hub:owner/name/config:split`."""

from __future__ import annotations

import re

from flowgrpo.data.tables import Row
from flowgrpo.errors import InputError
from flowgrpo.schema.readable import one_line
from rewards.memory import is_out_of_memory
from rewards.models import hub

SOURCE = re.compile(r"hub:(?P<path>[^/:\s]+/[^/:\s]+)(/(?P<config>[^/:\s]+))?:(?P<split>\S+)")


def is_dataset(source: str) -> bool:
    """Return whether a source of prompts is a dataset of the hub."""
    return source.startswith("hub:")


def rows(source: str, key: str, needed: str) -> list[tuple[str, Row]]:
    """Return the rows of a dataset's split, each with its place: the source and the row number from 1.

    The whole split is downloaded. Columns of pictures, sounds, videos and bytes are skipped; `needed` must not be one
    of them. Raises InputError, naming `key`, if `datasets` or the dataset is not available.
    """
    named = SOURCE.fullmatch(source)
    if not named:
        raise InputError(f"{key}: {source!r} is not written hub:owner/name:split or hub:owner/name/config:split")
    try:
        import datasets
    except ModuleNotFoundError:
        raise InputError(f"{key}: {source} needs the package datasets, pip install 'flowgrpo[hub]'") from None
    try:
        with hub.cache_if_unreachable(named["path"]):
            dataset = datasets.load_dataset(named["path"], named["config"], split=named["split"])
    except Exception as error:  # hub libraries raise many types
        if is_out_of_memory(error):
            raise
        reason = hub.explain_failure(error, named["path"], f"set {key} to a file", dataset=True)
        reason = reason or f"cannot be had from the hub ({one_line(str(error))})"
        raise InputError(f"{key}: {source} {reason}") from error
    media = (datasets.Image, datasets.Audio, datasets.Video)
    if isinstance(dataset.features.get(needed), media) or "binary" in str(dataset.features.get(needed)):
        raise InputError(f"{key}: the column {needed!r} of {source} holds {dataset.features[needed]}, not texts")
    plain = [n for n, kind in dataset.features.items() if not isinstance(kind, media) and "binary" not in str(kind)]
    return [(f"{source}:{number}", row) for number, row in enumerate(dataset.select_columns(plain), start=1)]
