"""The catalogue of methods: an entry for each word of an axis and for each preset, read from tables and sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_jsonable_python

from flowgrpo.commands.methods.rows import Row, read_rows
from flowgrpo.flow import methods as flow_methods
from flowgrpo.flow.methods import costs as flow_costs
from flowgrpo.flow.methods import presets as flow_presets
from flowgrpo.flow.methods import published as flow_published
from flowgrpo.mdlm import methods as text_methods
from flowgrpo.mdlm.methods import costs as text_costs
from flowgrpo.mdlm.methods import presets as text_presets
from flowgrpo.mdlm.methods import published as text_published
from flowgrpo.schema.base import Choice, Strict
from flowgrpo.schema.explain import section, sentences
from flowgrpo.schema.imports.sources import definitions, place
from flowgrpo.schema.preset_overrides import PresetRow

PAPER = re.compile(r"\b\d{4}\.\d{5}\b")  # an arXiv number


@dataclass(frozen=True, kw_only=True)
class Wing:
    """The tables of a kind of models."""

    kind: str
    title: str
    choices: Mapping[str, Mapping[str, type[Choice]]]
    questions: Mapping[str, str]
    presets: Mapping[str, PresetRow]
    rows: tuple[tuple[str, str], ...]  # module and name of the dictionaries with the presets and their comments
    published: Mapping[str, Mapping[str, Any]]
    not_said: Mapping[str, tuple[str, ...]]
    costs: Any  # module with COLUMNS, COSTS, GAINED and GAINS


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A word of an axis, or a preset."""

    name: str
    kind: str  # flow or mdlm
    axis: str  # "preset" for a preset
    summary: str  # one line
    text: str  # docstrings of a word; the comment of a preset, without departures
    source: list[str]  # arXiv numbers; none for what is ours or comes from code alone
    where: str  # file:line of the formula, or of the preset's row
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # of a word: default and meaning
    choices: PresetRow = field(default_factory=dict)  # of a preset, by axis
    cost: dict[str, int] | None = None  # of one iteration, as `flowgrpo plan` counts
    measured: dict[str, Any] | None = None  # gain, its error, and what they are
    published: dict[str, Any] = field(default_factory=dict)  # the source's own loop
    not_said: list[str] = field(default_factory=list)  # keys that the source does not give
    departures: list[str] = field(default_factory=list)  # from the source, numbered


FLOW = Wing(
    kind="flow",
    title="flow models",
    choices=flow_methods.CHOICES,
    questions=flow_methods.QUESTIONS,
    presets=flow_presets.PRESETS,
    rows=((flow_presets.__name__, "_ROWS"), (flow_presets.sample_presets.__name__, "PRESETS")),
    published=flow_published.PUBLISHED,
    not_said=flow_published.NOT_SAID,
    costs=flow_costs,
)
TEXTS = Wing(
    kind="mdlm",
    title="masked-diffusion language models",
    choices=text_methods.CHOICES,
    questions=text_methods.QUESTIONS,
    presets=text_presets.PRESETS,
    rows=((text_presets.__name__, "_ROWS"), (text_presets.tree_presets.__name__, "PRESETS")),
    published=text_published.PUBLISHED,
    not_said={},
    costs=text_costs,
)
WINGS = (FLOW, TEXTS)
DECODERS = ("flowgrpo.mdlm.decoding.decoders", "DECODERS")  # words that are rows, not classes


def catalogue() -> list[Entry]:
    """Return all entries: of each wing the words, axis by axis, then the presets."""
    return [entry for wing in WINGS for entry in (*words(wing), *presets(wing))]


def words(wing: Wing) -> Iterator[Entry]:
    """Yield an entry for each word of each axis."""
    for axis, choices in wing.choices.items():
        rows = read_rows(*DECODERS) if axis == "decoder" else {}
        for name, choice in choices.items():
            where, texts = (rows[name].where, [rows[name].text]) if rows else _formula(choice, name)
            yield Entry(
                name=name,
                kind=wing.kind,
                axis=axis,
                summary=_first_sentence(texts[0]),
                text="\n\n".join(texts),
                source=_papers(*texts),
                where=where,
                options=_options(choice),
            )


def presets(wing: Wing) -> Iterator[Entry]:
    """Yield an entry for each preset."""
    rows: dict[str, Row] = {name: row for table in wing.rows for name, row in read_rows(*table).items()}
    for name, choices in wing.presets.items():
        row, gain = rows[name], wing.costs.GAINS.get(name)
        yield Entry(
            name=name,
            kind=wing.kind,
            axis="preset",
            summary=_first_sentence(row.text),
            text=row.text,
            source=_papers(row.text),
            where=row.where,
            choices={axis: choices[axis] for axis in wing.choices},
            cost=dict(zip(wing.costs.COLUMNS, wing.costs.COSTS[name], strict=True)),
            measured=gain and {"gain": gain[0], "error": gain[1], "of": wing.costs.GAINED},
            published=dict(wing.published[name]),
            not_said=list(wing.not_said.get(name, ())),
            departures=row.departures,
        )


def _formula(choice: type[Choice], name: str) -> tuple[str, list[str]]:
    """Return the place of a word's formula, and its docstrings.

    The place is the function that the docstring names after `Formula:`, else a function of the word's name in the module
    of its class, else the class.
    """
    docstring = ast.get_docstring(definitions(choice.__module__)[choice.__name__]) or ""
    named = re.search(r"Formula: `([\w.]+)\.(\w+)`", docstring)
    module, function = named.groups() if named else (choice.__module__, name)
    node = definitions(module).get(function)
    if not isinstance(node, ast.FunctionDef):
        return place(module, definitions(module)[choice.__name__].lineno), [docstring]
    texts = [docstring, ast.get_docstring(node) or ""]
    shared = choice.model_fields["name"].is_required()  # one class for several words: the function says what a word is
    return place(module, node.lineno), texts[1:] if shared else texts


def _options(choice: type[Strict], above: str = "") -> dict[str, dict[str, Any]]:
    """Return default and meaning of each option of a word and of the options below it; a required one has no default."""
    meanings = sentences(choice)
    options: dict[str, dict[str, Any]] = {}
    for name, option in choice.model_fields.items():
        if name != "name":
            default = option.get_default(call_default_factory=True)
            known = {} if option.is_required() else {"default": to_jsonable_python(default)}
            options[above + name] = {**known, "meaning": meanings.get(name, "")}
            below = section(option.annotation)
            if below is not None:
                options[above + name]["where"] = place(
                    below.__module__, definitions(below.__module__)[below.__name__].lineno
                )
                options |= _options(below, f"{above}{name}.")
    return options


def _first_sentence(text: str) -> str:
    """Return the first sentence of a text, in one line."""
    return re.split(r"(?<=[.!?]) ", " ".join(text.partition("\n\n")[0].split()), maxsplit=1)[0]


def _papers(*texts: str) -> list[str]:
    """Return the arXiv numbers in some texts, each once."""
    return list(dict.fromkeys(PAPER.findall(" ".join(texts))))
