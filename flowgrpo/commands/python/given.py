"""Python objects as entries of a config: pipelines and prompts become files, rewards become names."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flowgrpo.errors import InputError
from flowgrpo.schema.explain import section
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.planning.meta_networks import build_on_meta
from rewards.base import nearest

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

PIPELINE = "pipeline"
DIGEST = "digest.txt"  # in that folder, of the pipeline that it was saved from


def check_sections(sections: Mapping[str, Any], kind: type[RunConfig]) -> None:
    """Raise InputError for a keyword that is no section of a config, with the section that has such a key."""
    known = {name: section(field.annotation) for name, field in kind.model_fields.items()}
    for key in sections:
        if key not in known:
            homes = [name for name, below in known.items() if below is not None and key in below.model_fields]
            hint = f"it is a key of {homes[0]}, write {homes[0]}={{{key!r}: ...}}" if homes else nearest(key, known)
            raise InputError(f"{key}: there is no such section, {hint}")


def check_given_once(given: Mapping[str, Any], sections: Mapping[str, Any]) -> None:
    """Raise InputError if a section has a key that is an argument, too; `given` has the arguments by their dotted keys."""
    for place, value in given.items():
        section, _, key = place.partition(".")
        if value is not None and key in sections.get(section, {}):
            raise InputError(f"{section}: its {key} is an argument, too; leave one of them out")


def uses_of(rewards: Any) -> list[dict[str, Any]]:
    """Return the entries of `rewards` or `eval_rewards` in a config, for one reward or several."""
    several = rewards if isinstance(rewards, Sequence) and not isinstance(rewards, str) else [rewards]
    return [use_of(reward) for reward in several]


def use_of(reward: str | Mapping[str, Any] | Callable[..., Any]) -> dict[str, Any]:
    """Return the entry of `rewards` in a config for a name, a map of keys, or an object that is called.

    The object is named by its module and the name it has there, such as `__main__:roundness` in a notebook. So a run finds
    it while the same code has been run. Raises InputError if no module has it under a name.
    """
    if isinstance(reward, str):
        return {"use": reward}
    if isinstance(reward, Mapping):
        named = reward.get("use")
        return {**reward, **({} if named is None else use_of(named))}
    if not callable(reward):
        raise InputError(f"rewards: {reward!r} is neither a name nor a map nor a function of samples and prompts")
    for module in (getattr(reward, "__module__", None), "__main__"):
        names = vars(sys.modules[module]) if module in sys.modules else {}
        name = getattr(reward, "__name__", "")
        if names.get(name) is not reward:
            name = next((name for name, each in names.items() if each is reward and not name.startswith("_")), "")
        if name:
            return {"use": f"{module}:{name}"}
    called = repr(reward.__name__) if hasattr(reward, "__name__") else f"an object of {type(reward).__name__}"
    raise InputError(
        f"rewards: {called} has no name in a module or a notebook's cell, so a run cannot "
        "find it; write it as a function there, or assign it to a name"
    )


def read_prompts(prompts: str | Sequence[str | Mapping[str, Any]], folder: Path, key: str) -> tuple[str, str | None]:
    """Return the source of prompts for a config: a text as it is, with None; for a list a file in `folder`, with its text.

    The text is a table with a row for each prompt, which `write_table` writes. The file is named by a digest of it. So
    several processes may write it, and a run that goes on with other prompts is refused. Raises InputError, which begins
    with `key`, if the list is empty or an entry is no prompt.
    """
    if isinstance(prompts, str):
        return prompts, None
    if not prompts:
        raise InputError(f"{key}: the list is empty, a run needs at least one prompt")
    rows = [{"prompt": each} if isinstance(each, str) else each for each in prompts]
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping) or not isinstance(row.get("prompt"), str):
            raise InputError(
                f'{key}: entry {number} is {row!r}, take a text or a map such as {{"prompt": "a red circle"}}'
            )
    try:
        text = "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)
    except TypeError as error:
        raise InputError(f"{key}: a column cannot be written to a table, {error}; of a picture give the path") from None
    return str(folder / f"{key}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.jsonl"), text


def write_table(file: Path, text: str) -> None:
    """Write a table of prompts whole, also where several processes write it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def check_pipeline(pipeline: DiffusionPipeline) -> None:
    """Raise InputError for a pipeline that a folder could not give back, or for several processes.

    A folder keeps weights, configs and the settings of the scheduler. It loses adapters and changed code. It also loses
    hooks that move weights between devices, which a run does not need.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise InputError("pipeline: several processes would save it, give the folder of a saved one")
    import diffusers
    from peft.tuners.tuners_utils import BaseTunerLayer

    kind = type(pipeline)
    if not isinstance(pipeline, diffusers.DiffusionPipeline):
        raise InputError(
            f"pipeline: {kind.__name__} is no pipeline of diffusers; give one, a folder, a hub id or a built-in model"
        )
    if getattr(diffusers, kind.__name__, None) is not kind:
        raise InputError(f"pipeline: {kind.__name__} is not diffusers' own, so a run could not load it from a folder")
    modules = {name: part for name, part in pipeline.components.items() if hasattr(part, "modules")}
    for name, part in modules.items():
        if any(isinstance(module, BaseTunerLayer) for module in part.modules()):
            raise InputError(f"pipeline: its {name} has adapters; call fuse_lora() and unload_lora_weights() first")
    if change := next(_changes(pipeline, modules), None):
        raise InputError(
            f"pipeline: {change}, which its folder would lose; change only weights, configs and the scheduler's settings"
        )


def _changes(pipeline: DiffusionPipeline, modules: Mapping[str, torch.nn.Module]) -> Iterator[str]:
    """Yield what a pipeline has that neither its weights nor its configs give back."""
    shift = getattr(pipeline.scheduler, "shift", None)
    if shift != (written := pipeline.scheduler.config.get("shift", shift)):
        yield f"its scheduler has shift {shift}, and {written} in its config"
    if changed := _changed_code(pipeline):
        yield f"it has {changed} of its own"
    for name, part in modules.items():
        whole = getattr(part, "_orig_mod", part)  # of a compiled module
        found = {f"{name}.{place}".rstrip("."): module for place, module in whole.named_modules()}
        for place, module in found.items():
            if changed := _changed_code(module):
                yield f"{place} has {changed} of its own"
        for place, made in _as_made(whole).named_modules():
            where = f"{name}.{place}".rstrip(".")
            if type(module := found.get(where)) is not type(made):
                yield f"{where} is a {type(module).__name__} in place of a {type(made).__name__}"
            for key, value in vars(made).items():
                if type(value) in (int, float) and (own := getattr(module, key, None)) != value:
                    yield f"{where}.{key} is {own}, and {value} by its config"


def _as_made(network: torch.nn.Module) -> torch.nn.Module:
    """Return a network on the meta device as its config gives it; the network itself if it is quantised."""
    kind, settings = type(network), getattr(network, "config", None)
    if settings is None or getattr(network, "hf_quantizer", None) is not None:
        return network
    if hasattr(kind, "from_config"):  # of diffusers
        return build_on_meta(lambda: kind.from_config(settings), torch.float32)
    return build_on_meta(lambda: kind(deepcopy(settings)), torch.float32)


def _changed_code(thing: Any) -> str | None:
    """Return what replaces or hooks the code of a pipeline or module; None if it runs the code of its class."""
    if hasattr(thing, "_hf_hook") or hasattr(thing, "_diffusers_hook"):
        return None  # moved between devices
    for name, value in vars(thing).items():
        if callable(value) and not isinstance(value, torch.nn.Module) and callable(getattr(type(thing), name, None)):
            return f"a {name}"
    if not isinstance(thing, torch.nn.Module):
        return None
    if (processor := getattr(thing, "processor", None)) and not _is_library(type(processor)):
        return f"a processor {type(processor).__name__}"
    return next(("a forward hook" for hook in thing._forward_hooks.values() if not _is_library(hook)), None)


def _is_library(code: Any) -> bool:
    return getattr(code, "__module__", "").partition(".")[0] in ("torch", "diffusers", "transformers", "accelerate")


def save_pipeline(pipeline: DiffusionPipeline, folder: Path) -> None:
    """Save a pipeline to a folder, in place of what is there, with its digest."""
    partial = folder.with_name(f"{folder.name}.partial")
    for place in (folder, partial):
        shutil.rmtree(place, ignore_errors=True)
    pipeline.save_pretrained(partial)
    (partial / DIGEST).write_text(_digest(pipeline), encoding="utf-8")
    partial.rename(folder)


def check_same_pipeline(pipeline: DiffusionPipeline, folder: Path) -> None:
    """Raise InputError unless a pipeline is the one that `save_pipeline` saved to a folder."""
    file = folder / DIGEST
    if not file.is_file() or file.read_text(encoding="utf-8") != _digest(pipeline):
        run = folder.parent.name.removesuffix("-inputs")
        raise InputError(
            f"pipeline: the run {run!r} began with other weights or another scheduler; take another name, or give the "
            f"folder {folder} as the pipeline"
        )


def _digest(pipeline: DiffusionPipeline) -> str:
    """Return a digest of the weights of a pipeline and of its scheduler's settings."""
    found = hashlib.blake2b()
    for name, part in sorted(pipeline.components.items()):
        if isinstance(part, torch.nn.Module):
            for key, weight in part.state_dict().items():
                found.update(f"{name} {key} {weight.dtype} {tuple(weight.shape)}\n".encode())
                found.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    settings = {key: value for key, value in pipeline.scheduler.config.items() if not key.startswith("_")}
    found.update(repr(sorted(settings.items())).encode())
    return found.hexdigest()
