"""`flowgrpo rewards`: describe built-in rewards and those that installed packages register."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from rich.table import Table

from flowgrpo.commands.terminal import Format, out, print_json, print_line, say
from flowgrpo.errors import InputError
from flowgrpo.schema.imports.sources import definitions
from rewards import BUILT_IN
from rewards.base import ENTRY_POINTS, find, nearest
from rewards.cards import BYTES

Options = Mapping[str, Any]  # name -> default, or `inspect.Parameter.empty`


def rewards(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="the reward to describe")] = None,
    form: Format = "human",
) -> None:
    """List the rewards that can be used by name, or describe one."""
    rows = catalogue()
    if name is not None:
        rows = [row for row in rows if row["name"] == name]
        if not rows:
            raise InputError(f"there is no reward {name!r}, {nearest(name, BUILT_IN)}")
    if form == "json":
        print_json(rows)
    elif name is not None:
        for key in ("measures", "inputs", "range", "weights"):
            print_line(f"{key:8} {rows[0][key] or 'none'}")
        if any((rows[0]["memory"] or {}).values()):
            print_line(f"{'memory':8} {_describe_memory(rows[0]['memory'])}")
        print_line(f"{'licence':8} {rows[0]['licence'] or 'none'}")
        print_line("\n" + reward_help(name))
    else:
        table = Table("name", "inputs", "range", box=None, padding=(0, 2))
        for row in rows:
            table.add_row(*(row[key] or "" for key in ("name", "inputs", "range")))
        out.print(table)
        say("flowgrpo rewards NAME shows weights, licence and options")


def catalogue() -> list[dict[str, Any]]:
    """Return a row per reward: its name, the fields of its card, and memory, the bytes of the weights by dtype.

    Rewards of other packages have only a name.
    """
    shown = ("measures", "inputs", "range", "weights", "licence")
    built_in = [
        {
            "name": name,
            **{key: getattr(card, key) for key in shown},
            "memory": {dtype: card.memory(dtype) for dtype in BYTES},
        }
        for name, card in BUILT_IN.items()
    ]
    unknown = dict.fromkeys((*shown, "memory"))
    installed = [{"name": point.name, **unknown} for point in entry_points(group=ENTRY_POINTS)]
    return built_in + installed


def _describe_memory(memory: Mapping[str, int]) -> str:
    """Return the memory of a reward's weights on its device, by dtype."""
    full, half = (memory[dtype] / 1e9 for dtype in ("float32", "bfloat16"))
    return f"weights {full:.1f} GB in float32, {half:.1f} GB in bfloat16 or float16; a batch takes more"


def reward_help(name: str) -> str:
    """Return a reward's docstring, its options and a line for a config. Built-in rewards are not imported."""
    docstring, options = _describe(name)
    preset = BUILT_IN[name].options if name in BUILT_IN else {}
    lines = [docstring or "It has no docstring.", "".join(f"{key}: {value}\n" for key, value in preset.items())]
    use = f"{{use: {name}}}"
    if options is not None:
        options = {**options, **preset}
        empty = inspect.Parameter.empty
        shown = [key if default is empty else f"{key} ({default})" for key, default in options.items()]
        needed = ", ".join(f"{key}: ..." for key, default in options.items() if default is empty)
        lines.append(f"Options: {', '.join(shown) or 'none'}")
        use = f"{{use: {name}, options: {{{needed}}}}}" if needed else use
    return "\n\n".join([*filter(None, lines), f"In a config: rewards: [{use}]"])


def options_of(use: str) -> Options | None:
    """Return the options of a reward, None for a function; raise RewardError if there is no such reward."""
    return _describe(use)[1]


def _describe(use: str) -> tuple[str | None, Options | None]:
    return _read(BUILT_IN[use].target) if use in BUILT_IN else _read_plugin(find(use))


def _read_plugin(reward: Any) -> tuple[str | None, Options | None]:
    """Return the docstring of a function or a class, and the options of a class; None for a function."""
    if not inspect.isclass(reward):
        return inspect.getdoc(reward), None
    kinds: list[Any] = [kind for kind in reward.__mro__ if "__init__" in vars(kind) and kind is not object]
    parameters = ([*inspect.signature(kind.__init__).parameters.values()][1:] for kind in kinds)  # without self
    constructors = (
        ({p.name: p.default for p in taken if p.kind is not p.VAR_KEYWORD}, any(p.kind is p.VAR_KEYWORD for p in taken))
        for taken in parameters
    )
    return inspect.getdoc(reward), _merge_options(constructors)


def _read(target: str) -> tuple[str | None, Options | None]:
    """Return the docstring and the options of `module:name` of this package, from its source alone."""
    module, _, name = target.partition(":")
    node = definitions(module)[name]
    if not isinstance(node, ast.ClassDef):
        return ast.get_docstring(node), None
    return ast.get_docstring(node), _merge_options(_constructors(module, name))


def _merge_options(constructors: Iterable[tuple[Options, bool]]) -> Options:
    """Merge the options of constructors, listed from a class to its bases; stop after the first without **kwargs."""
    options: dict[str, Any] = {}
    for added, has_kwargs in constructors:
        options |= {key: default for key, default in added.items() if key not in options}
        if not has_kwargs:
            break
    return options


def _constructors(module: str, name: str) -> Iterator[tuple[Options, bool]]:
    """Yield the options of each `__init__` of a class, then of its bases, and whether it accepts **kwargs."""
    names = definitions(module)
    for node in names[name].body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            taken = node.args
            plain = [argument.arg for argument in (*taken.posonlyargs, *taken.args)][1:]  # without self
            required = len(plain) - len(taken.defaults)
            defaults = dict.fromkeys(plain[: max(required, 0)], inspect.Parameter.empty)
            defaults |= {
                key: _value(default, names)
                for key, default in (
                    *zip(plain[max(required, 0) :], taken.defaults, strict=True),
                    *((a.arg, d) for a, d in zip(taken.kwonlyargs, taken.kw_defaults, strict=True)),
                )
            }
            yield defaults, taken.kwarg is not None
    for base in names[name].bases:
        definition = names.get(base.id) if isinstance(base, ast.Name) else None
        if isinstance(definition, ast.ImportFrom) and definition.module is not None:
            yield from _constructors(definition.module, base.id)
        elif isinstance(definition, ast.ClassDef):
            yield from _constructors(module, base.id)


def _value(node: ast.expr | None, names: Mapping[str, Any]) -> Any:
    """Return the value of a default that is a literal or a constant of the module."""
    if node is None:
        return inspect.Parameter.empty
    return ast.literal_eval(names[node.id].value if isinstance(node, ast.Name) else node)
