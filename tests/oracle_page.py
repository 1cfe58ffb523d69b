"""The tables of docs/research/oracle.md: how they are printed and read."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table of Markdown."""
    yield from ("| " + " | ".join(heads) + " |", "|---" * len(heads) + "|")
    for cells in rows:
        yield "| " + " | ".join(cells) + " |"


def on_page(heading: str) -> dict[str, str]:
    """Return the rows of the table under a heading of docs/research/oracle.md, by their first cell."""
    text = (Path(__file__).parents[1] / "docs/research/oracle.md").read_text()
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    _, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    return {line.split("|")[1].strip(): line for line in rows}


def numbers(line: str) -> list[float]:
    return [float(word) for word in re.findall(r"\d+(?:\.\d+)?", line.split("|", 2)[2])]


def check_known(found):
    """Check size and direction of the rows whose expected size is known."""
    known = [each for each in found if each.expected is not None]
    assert known
    for each in known:
        assert abs(each.size - each.expected) < 3 * each.error, each
        assert each.error < 0.12 * each.expected, each
        assert each.turned < 4, each  # the worst of nine steps, in standard errors
