"""Prompts that a text encoder cuts: counted, in the place of the page that diffusers prints of each."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

LOGGER = logging.getLogger(__name__)
CUT = re.compile(r"was truncated because .*?(\d+)\s+tokens")
LONG = "Token indices sequence length is longer"  # of transformers, which then cuts nothing


class CutPrompts:
    """The prompts that were cut, by the number of tokens at which they were."""

    def __init__(self) -> None:
        self._texts: dict[int, set[str]] = defaultdict(set)

    @contextmanager
    def counted(self, prompt: Any) -> Iterator[None]:
        """Note the prompt of a call, a text or a list of one, where a library says that it cuts it; that is not printed."""
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
        """Say in one line how many of some prompts were cut, and forget them."""
        if cut := set().union(*self._texts.values()):
            places = ", ".join(f"{len(texts)} at {limit} tokens" for limit, texts in sorted(self._texts.items()))
            LOGGER.warning(
                "%d of %d prompts are longer than a text encoder reads, and cut: %s", len(cut), among, places
            )
        self._texts.clear()
