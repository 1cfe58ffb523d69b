"""Reads a model card as a Markdown renderer and a shell do."""

import itertools
import subprocess

from markdown_it import MarkdownIt

HOSTILE = [
    "a|b \\| `c` ```d``` *e* _f_ <g> &amp; &#65; [h](i) ![j](k) \\ 'l' \"m\" ~~n~~ $o$ #p {q}",
    "two\nlines\n```\nand | a fence\n\n| x | y |\n|---|---|",
    "🎨 a red 👩‍🚀 'circle', ünïcode — 漢字",
    "carriage\r\nreturn, escape \x1b[2J, tab\t, bell \x07, \x7f and 'quotes'\\n",
    "[/INST] :smile: [bold]x[/bold] $(touch pwned) `touch pwned` ; touch pwned # %s",
    "````python\n'''\n\"\"\"",
]


def blocks(text):
    """Map each fenced block's language to its content."""
    return {token.info: token.content.removesuffix("\n") for token in MarkdownIt().parse(text) if token.type == "fence"}


def table(text):
    """Return the rows of the one table, each cell as it is shown."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    assert sum(token.type == "table_open" for token in tokens) == 1
    rows = []
    for before, token in itertools.pairwise(tokens):
        if token.type == "tr_open":
            rows.append([])
        if before.type == "td_open":
            shown = {"text": lambda t: t.content, "text_special": lambda t: t.content, "html_inline": lambda t: "\n"}
            rows[-1].append("".join(shown[child.type](child) for child in token.children if child.type != "image"))
    return rows[1:]


def words(command):
    """Return what a shell calls the command with."""
    shell = ["bash", "-c", 'flowgrpo() { printf "%s\\0" "$@"; }\n' + command]
    return subprocess.run(shell, capture_output=True, check=True).stdout.decode().split("\0")[:-1]


def as_shown(prompt):
    """Return a text as a table shows it."""
    return prompt.replace("\r\n", "\n").replace("\x1b", "\\x1b").replace("\x07", "\\x07").replace("\x7f", "\\x7f")
