"""The commands that the pages show: found in their blocks, joined, and split into words as a shell would."""

import re
import shlex
from dataclasses import dataclass

FENCE = re.compile(r"\s*(```+|~~~+)\s*(\w*)")
SHELLS = ("", "sh", "bash", "shell", "console")
PROGRAMS = r"flowgrpo(?: [a-z]|$)|(?:\S*/)?python \S+\.py|accelerate launch |torchrun |srun "
OTHERS = r"pip install|docker |hf |sglang |printf |\S*/python -m|[A-Z_]+=\S+ flowgrpo "
STARTS = re.compile(rf"({PROGRAMS}|{OTHERS})|make [a-z-]+ *(#|$)")
INLINE = re.compile(r"`(flowgrpo [a-z][^`]*)`")
VARIABLE = re.compile(r"([A-Z]+)=(\"[^\"]*\"|\S+)(?:; )?")


@dataclass(frozen=True)
class Command:
    page: str
    line: int
    words: tuple[str, ...]

    def __str__(self):
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"

    @property
    def text(self):
        return " ".join(self.words)


def inline(page, text):
    """List the commands that stand within the sentences of a page."""
    found = [(text.count("\n", 0, match.start()) + 1, match[1].replace("\n", " ")) for match in INLINE.finditer(text)]
    return [Command(page, line, tuple(shlex.split(words))) for line, words in found]


def blocks(text):
    """List the blocks in which commands may stand, as (number, line without indent or prompt)."""
    found, fence, shell, block = [], None, False, []
    for number, line in enumerate([*text.splitlines(), "end"], 1):
        mark = FENCE.match(line)
        inside = False
        if fence:
            if mark and mark[1] == fence:
                fence = None
            else:
                inside = shell
        elif mark:
            fence, shell = mark[1], mark[2] in SHELLS
        else:
            inside = line.startswith("    ")
        if inside:
            block.append((number, line.strip().removeprefix("$ ")))
        elif block and (line.strip() or fence):
            found.append(block)
            block = []
    return found


def filled(text, variables):
    """Put in the variables that the block has set, and a machine for a command within a command."""
    text = re.sub(r"\$\([^)]*\)", "FIRST", text)
    return re.sub(r"\$([A-Z_]+)", lambda name: variables.get(name[1], name[1]), text)


def commands(page, text):
    """List the commands of a page's text; raise a ValueError for a quotation without an end."""
    found = []
    for block in blocks(text):
        lines, variables = iter(block), {}
        for number, line in lines:
            if VARIABLE.match(line):
                for name, value in VARIABLE.findall(line):
                    variables[name] = filled(value.strip('"'), variables)
            if not STARTS.match(line):
                continue
            while True:
                whole = line.removesuffix("\\")
                try:
                    words = shlex.split(filled(whole, variables), comments=True)
                except ValueError:  # a quotation goes on in the next line
                    words = None
                if words is not None and whole == line:
                    break
                _, more = next(lines, (None, None))
                if more is None:
                    raise ValueError(f"{page}:{number}: {line} has no end")
                line = f"{whole} {more}"
            found.append(Command(page, number, tuple(words)))
    return found
