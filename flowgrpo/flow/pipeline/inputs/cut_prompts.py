"""A count of the prompts that a text encoder truncates, in place of diffusers' warning about each."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

LOGGER = logging.getLogger(__name__)
CUT = re.compile(r"was truncated because .*?(\d+)\s+tokens")
LONG = "Token indices sequence length is longer"  # warning of transformers, which itself truncates nothing


class CutPrompts:
    """Truncated prompts, grouped by the number of tokens that are kept."""

    def __init__(self) -> None:
        self._texts: dict[int, set[str]] = defaultdict(set)

    @contextmanager
    def counted(self, prompt: Any) -> Iterator[None]:
        """Return a context that notes the prompt of one call if a library logs its truncation, and hides that log."""
        text = "".join(prompt) if isinstance(prompt, list) else str(prompt)

        def heard(record: logging.LogRecord) -> bool:
            said = record.getMessage()
            if found := CUT.search(said):
                self._texts[int(found[1])].add(text)
            return not (found or said.startswith(LONG))

        with ExitStack() as stack:
            for handler in (h for name in ("diffusers", "transformers") for h in logging.getLogger(name).handlers):
                handler.addFilter(heard)
                stack.callback(handler.removeFilter, heard)
            yield

    def tell(self, among: int) -> None:
        """Log in one line how many of `among` encoded prompts were truncated, and forget them."""
        if cut := set().union(*self._texts.values()):
            places = ", ".join(f"{len(texts)} at {limit} tokens" for limit, texts in sorted(self._texts.items()))
            LOGGER.warning(
                "%d of the %d prompts encoded so far are longer than a text encoder reads, and cut: %s",
                len(cut),
                among,
                places,
            )
        self._texts.clear()
