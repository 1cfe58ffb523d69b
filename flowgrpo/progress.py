"""The progress bars of the libraries that models are loaded with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep the bars of loading and saving out of the log; those of a download stay."""
    libraries = [library for library in (diffusers_logging, transformers_logging) if library.is_progress_bar_enabled()]
    for library in libraries:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in libraries:
            library.enable_progress_bar()
