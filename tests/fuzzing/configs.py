"""Broken configs and overrides, through what every command reads them with.

A case is a file's bytes and the overrides of a command line. The real configs, as they are written and with every key filled
in, are changed in some places: other values, other keys, other depths; then, in some cases, as text.
"""

import contextlib
import copy
import io
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import yaml
from hypothesis import strategies as st

import flowgrpo.commands.runs.plan  # noqa: F401 - the first case would wait for what it imports
from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.commands.model_kinds import KINDS
from flowgrpo.data import configs as built_in
from flowgrpo.data import yaml_maps
from flowgrpo.flow import methods as axes
from flowgrpo.flow.methods import presets
from flowgrpo.mdlm import methods as mdlm_axes
from flowgrpo.mdlm.methods import presets as mdlm_presets
from flowgrpo.schema.sections import RunConfig
from fuzzing.runner import Summary, refusal, run

ROOT = Path(__file__).parents[2]
NAME = "config.yaml"
Place = tuple[str | int, ...]

WHOLE = (0, -1, 1, 3, 2**31, 2**63, 10**30, 10**4000)
FLOATS = (0.0, -0.0, 0.5, 5e-324, 1e308, *map(float, ("nan", "inf", "-inf")))
TEXTS = ("", "x", "a.b", "../..", "/", "~", "\0", "\x1b[31m", "\ud800", "\u2028", "é\n", " ", "[", "x" * 90_000)
OTHERS = (None, True, False, [], {}, [[]], b"\xff", {1: 2}, {None: 0}, {"": ""}, {"\ud800": 1}, {1.5: "a", True: "b"})
YAML = r"""
&a [*a]
&a {b: *a}
<<: *a
<<: 3
!!python/object:os.system x
!!set {a, b}
!!omap [a: 1]
!!binary '='
!!int x
!!float .
!!timestamp x
2026-13-45
1:2:3
0o7
--- 1
%YAML 9.9
? [a]
? {a: b}
"\ud800"
> 9
"""
LONG = ("[" * 100, "{a: " * 100, "[" * 70 + "]" * 70, "- " * 3000, "9" * 5000, "0x" + "f" * 5000)
FRAGMENTS = (*YAML.strip().splitlines(), *LONG, *"-:\t\0\ufeff\x85'\"|#@`%!&*[{")


@cache
def bases() -> tuple[dict[str, Any], ...]:
    """Return the repository's configs and the built-in ones, each as written and as resolved."""
    files = sorted({file.resolve() for folder in (ROOT / "configs", built_in.FOLDER) for file in folder.glob("*.yaml")})
    return tuple(base for file in files for base in (yaml_maps.read_map(file), config.load(file).model_dump()))


@cache
def words() -> tuple[str, ...]:
    """List the names of all presets and of all choices of an axis."""
    tables = (presets.PRESETS, *axes.CHOICES.values(), mdlm_presets.PRESETS, *mdlm_axes.CHOICES.values())
    return tuple(dict.fromkeys(word for table in tables for word in table))


def places(value: Any, above: Place = ()) -> list[Place]:
    """List every place in maps and lists as the keys on the way to it."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in inner for found in ((*above, key), *places(item, (*above, key)))]


def nested(value: Any, depth: int) -> Any:
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def values() -> st.SearchStrategy[Any]:
    """Draw what stands where something else should."""
    plain = st.sampled_from((*WHOLE, *FLOATS, *TEXTS, *OTHERS)) | st.integers() | st.floats() | st.text(max_size=12)
    several = st.lists(plain, max_size=3) | st.dictionaries(st.text(max_size=5), plain, max_size=3)
    deep = st.builds(nested, plain, st.integers(1, 200))
    return plain | st.deferred(lambda: st.sampled_from(words())) | several | deep


@st.composite
def documents(draw: st.DrawFn) -> Any:
    """Draw a config that is changed in a few places."""
    written = copy.deepcopy(draw(st.sampled_from(bases())))
    for _ in range(draw(st.integers(0, 3))):
        *parents, last = draw(st.sampled_from(places(written) or [("model",)]))
        inside = written
        for key in parents:
            inside = inside[key]
        match draw(st.sampled_from(("value", "value", "remove", "key", "rename", "exchange"))):
            case "value":
                inside[last] = copy.deepcopy(draw(values()))
            case "remove":
                del inside[last]
            case "key" if isinstance(inside, dict):
                inside[draw(st.sampled_from((*TEXTS, 1, None, f"{last}x", *words())))] = copy.deepcopy(draw(values()))
            case "rename" if isinstance(inside, dict):
                inside[f"{last}"[:-1]] = inside.pop(last)
            case "exchange":
                other = draw(st.sampled_from(bases()))
                inside[last] = copy.deepcopy(other[draw(st.sampled_from(sorted(other)))])
    return written


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """Draw the bytes of a config, sometimes broken as text."""
    text = yaml.safe_dump(draw(documents()), sort_keys=False, allow_unicode=draw(st.booleans()))
    for _ in range(draw(st.sampled_from((0, 0, 0, 0, 1, 2)))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.sampled_from((0, 0, 1, 7, 60))))
        text = text[:start] + draw(st.sampled_from(("", *FRAGMENTS)) | st.text(max_size=5)) + text[end:]
    data = text.encode(draw(st.sampled_from(("utf-8",) * 15 + ("utf-16",))), "surrogatepass")
    return draw(st.sampled_from((data,) * 15 + (data[::-1],)))


@st.composite
def overrides(draw: st.DrawFn) -> str:
    """Draw a key and a value of a command line, mostly with a known key."""
    place = ".".join(map(str, draw(st.sampled_from(places(draw(st.sampled_from(bases())))))))
    strange = (f"{place}.x", f"{place}x", "", ".", "a" + ".a" * 70, f".{place}", f"{place}.")
    key = draw(st.sampled_from((place,) * 5 + strange))
    plain = st.sampled_from((*FRAGMENTS, *words(), *TEXTS, "[", "[a, {b: ", "{use: shapes}", *map(str, WHOLE)))
    value = draw(plain | st.text(max_size=8))
    return key + draw(st.sampled_from(("=",) * 9 + ("",))) + value


def cases() -> st.SearchStrategy[tuple[bytes, list[str]]]:
    return st.tuples(files(), st.lists(overrides(), max_size=2))


def planned(settings: RunConfig) -> dict[str, Any]:
    """Take an accepted config in place of the plan: what it is dumped as must be the same config."""
    assert config.validate(yaml_maps.parse_yaml(config.dump(settings), NAME)) == settings, (
        "it is not what it is dumped as"
    )
    return {}


def attempt(case: tuple[bytes, list[str]]) -> str | None:
    """Let `flowgrpo plan` read a case; return None if it is accepted."""
    data, keys = case
    plan = SimpleNamespace(plan=planned, table=lambda plan: [])
    readers = {name: replace(kind, plan=plan) for name, kind in KINDS.items()}
    with tempfile.TemporaryDirectory() as folder, patch.dict(KINDS, readers), contextlib.chdir(folder):
        Path(NAME).write_bytes(data)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(["plan", NAME, "--format", "json", "--", *keys])
    if status == 0:
        assert not err.getvalue(), f"accepted, but says {err.getvalue()!r}"
        return None
    return refusal(status, err.getvalue())


def fuzz(seed: int, count: int) -> Summary:
    return run("configs", cases(), attempt, seed, count)
