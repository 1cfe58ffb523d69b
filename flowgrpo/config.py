"""Config files of flow and language models: strict reading, command line overrides, one-sentence errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from typing_extensions import TypeIs

from flowgrpo.data import config_paths, configs, run_folders, tables
from flowgrpo.data.embedded import EMBEDDED
from flowgrpo.data.yaml_maps import parse_yaml, read_map
from flowgrpo.errors import InputError
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.schema.sections import RunConfig
from flowgrpo.schema.validation import checked, has_key
from rewards.base import nearest

if TYPE_CHECKING:
    from flowgrpo.flow import config as flow_config
    from flowgrpo.mdlm import config as text_config
else:  # a command needs the schema of one kind
    flow_config = lazy("flowgrpo.flow.config")
    text_config = lazy("flowgrpo.mdlm.config")

RENAMED = {"train.memory": "train.half_life"}  # old keys -> new keys

CONFIGS: dict[str, Callable[[], type[RunConfig]]] = {
    "flow": lambda: flow_config.Config,
    "mdlm": lambda: text_config.TextConfig,
}


def load(path: str | Path, overrides: Iterable[str] | Mapping[str, Any] = ()) -> RunConfig:
    """Return the configuration of a YAML file with overrides applied; raise InputError if something in it is wrong.

    Relative paths in the file are searched beside the file first (see `flowgrpo.data.config_paths`). Paths in overrides
    and in built-in configs are relative to the current folder.

    Args:
        path: a file, or the name of a built-in config.
        overrides: `key=value` texts with dotted keys and YAML values, or a map of dotted keys to values.
    """
    path = configs.place_of(path)
    if path.is_dir():
        raise InputError(f"{path}: is a folder, not a config; to go on with a run, give its config and run.resume=true")
    if not path.is_file():
        raise InputError(f"{path}: no such config file{_similar_file(path)}")
    written = read_map(path)
    missing = [] if configs.is_built_in(path) else config_paths.resolve(written, path.parent)
    _override(written, overrides)
    config_paths.check_found(written, missing, path.parent)
    return validate(written)


def of_run(folder: Path, *, resolve: bool = True) -> RunConfig:
    """Return the configuration in a run's folder; renamed keys of old runs are accepted.

    With `resolve` relative paths are searched in the folder where the run was started, then in the current one. Raises
    InputError if there is no run, or its configuration cannot be read.
    """
    if not (folder / "config.yaml").is_file():
        raise InputError(f"{folder}: there is no run here, a run's folder holds config.yaml{run_folders.hint(folder)}")
    written = read_map(folder / "config.yaml")
    for before, now, section in _find_old_keys(written):
        _set(written, now, section.pop(before.rpartition(".")[2]))
    if resolve and (folder / "environment.json").is_file():
        started = tables.document(folder / "environment.json")
        if isinstance(started, dict) and isinstance(started.get("folder"), str):
            config_paths.resolve(written, Path(started["folder"]))
    return validate(written)


def apply_override(written: dict[str, Any], overrides: Iterable[str] | Mapping[str, Any] = ()) -> RunConfig:
    """Apply overrides to a map in place and return its configuration; see `load`."""
    _override(written, overrides)
    return validate(written)


def validate(written: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of a map; raise InputError if it is wrong."""
    kind = written.get("kind", "flow")
    if not isinstance(kind, str) or kind not in CONFIGS:
        raise InputError(f"kind: {kind!r} is unknown, {nearest(str(kind), CONFIGS)}")
    for before, now, _ in _find_old_keys(written):
        raise InputError(f"{before}: it is called {now} now")
    try:
        return checked(CONFIGS[kind](), written)
    except InputError as error:
        raise InputError(f"{error}{_of_other_kind(str(error), kind, written)}") from None


def is_flow(config: RunConfig) -> TypeIs[flow_config.Config]:
    """Return whether a configuration is of a flow model."""
    return config.kind == "flow"


def dump(config: RunConfig) -> str:
    """Return the resolved configuration as YAML, which loads to the same configuration."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False)


def override(text: str) -> tuple[str, Any]:
    """Parse a `key=value` text; the value is YAML. Raises InputError if the text is malformed."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise InputError(f"{text!r}: an override is written key=value, for example train.iterations=4")
    return key, parse_yaml(value, key)


def _override(written: dict[str, Any], overrides: Iterable[str] | Mapping[str, Any]) -> None:
    for key, value in overrides.items() if isinstance(overrides, Mapping) else map(override, overrides):
        _set(written, key, value)


def _set(written: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    if len(parents) > tables.DEEPEST:
        raise InputError(f"{key[:40]}...: has {len(parents)} dots, at most {tables.DEEPEST} are read")
    at = written
    for i, parent in enumerate(parents):
        inner: Any = at.get(parent)
        if isinstance(inner, str) and (parents[:1] == ["algorithm"] or parent in ("decoder", "optimizer", "schedule")):
            inner = {"name": inner}
        if isinstance(inner, int | float) and parent == "ema":
            inner = {"decay": inner}
        if isinstance(inner, int | float) and parent == "half_life":
            inner = {"after": inner}
        if isinstance(inner, str) and parent == "second_stage":
            inner = {"form": inner}
        if inner is None:
            inner = {}
        if isinstance(inner, list):
            whole = ".".join(parents[: i + 1])
            raise InputError(f"{key}: {whole} is a list, which an override replaces whole; write {whole}=[...]")
        if not isinstance(inner, dict):
            raise InputError(
                f"{key}: {'.'.join(parents[: i + 1])} is not a map, it has no key {(*parents, last)[i + 1]!r}"
            )
        at[parent] = at = inner
    at[last] = value


def similar(path: Path) -> list[str]:
    """Return the config beside a path, or built in, that has the most similar name; [] if none is similar."""
    files = path.parent.glob("*.y*ml") if path.parent.is_dir() else ()
    by_name = {**{name: name for name in configs.names()}, **{file.name: str(file) for file in files}}
    return [by_name[name] for name in get_close_matches(path.name, by_name, 1)]


def _similar_file(path: Path) -> str:
    if not path.suffix:
        files = [file for file in (Path(f"{path}.yaml"), Path("configs", f"{path}.yaml")) if file.is_file()]
        if files:
            return f", did you mean {str(files[0])!r}?"
        if str(path) in EMBEDDED:
            return f"; {path} is a model, which a config names: model: {{path: {path}}}"
        return f" and no built-in config of that name, {nearest(str(path), configs.names())}"
    names = [p.name for p in path.parent.iterdir() if p.suffix in (".yaml", ".yml")] if path.parent.is_dir() else []
    close = get_close_matches(path.name, names, 1)
    return f", did you mean {str(path.with_name(close[0]))!r}?" if close else "; flowgrpo init has some to begin with"


def _of_other_kind(sentence: str, kind: str, written: Mapping[str, Any]) -> str:
    """Return the end of an error message that tells of the other kind, if it has the key or preset; else ""."""
    place, _, problem = sentence.partition(": ")
    for other in CONFIGS.keys() - {kind} if "unknown" in problem else ():
        model = CONFIGS[other]()
        is_key = problem.startswith("unknown key") and has_key(model, place)
        if is_key or (place == "algorithm.preset" and _has_preset(model, written["algorithm"]["preset"])):
            return f"; kind: {other} has it, and this config is of kind: {kind}"
    return ""


def _has_preset(model: type[RunConfig], name: str) -> bool:
    section: Any = model.model_fields["algorithm"].annotation
    try:
        checked(section, {"preset": name}, "algorithm")
    except InputError:
        return False
    return True


def _find_old_keys(written: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield the renamed keys that a config still uses: old name, new name, and the map that holds the key."""
    for before, now in RENAMED.items():
        *sections, key = before.split(".")
        section: Any = written
        for name in sections:
            section = section.get(name) if isinstance(section, Mapping) else None
        if isinstance(section, Mapping) and key in section:
            yield before, now, section
