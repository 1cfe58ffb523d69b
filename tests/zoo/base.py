"""Build the pipelines of the zoo from the tables in its YAML files.

A table has `sets` of components and `specimens`. A specimen has the name of its pipeline class, components of its own
(`with`) and of sets (`like`), built in this order, and changes of their arguments (`change`). A tag is the class of a
component, or a function of `parts`, with its arguments. Arguments that begin with `_` apply to the finished component:
`_fill` (see `fill`), `_normal` (parameters to draw, with their standard deviation), `_dtype`, and `_config` (to register).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
import yaml
from diffusers import DiffusionPipeline
from PIL import Image

from flowgrpo.data.prompts import Row


@dataclass(frozen=True)
class Specimen:
    """A tiny pipeline and how to call it.

    Attributes:
        build: builds the pipeline; takes changed arguments of its components.
        task: text-to-image, image-editing, text-to-video, image-to-video, text-to-audio, ...
        call: arguments of its call, as `model.call` in a config.
        columns: conditions of a row by argument name: pictures (PIL), lists of them, texts.
        prompts: two of unequal length that the pipeline understands.
    """

    build: Callable[..., DiffusionPipeline]
    task: str
    call: dict[str, Any]
    columns: dict[str, Any] = field(default_factory=dict)
    prompts: tuple[str, str] = ("a red fox in the snow", "a cat")

    @property
    def rows(self) -> list[Row]:
        """Three rows for `flowgrpo.flow.diagnostics.certificate`: two of one prompt, and one of another."""
        long, short = self.prompts
        return [Row(prompt, seed, self.columns) for seed, prompt in enumerate((long, long, short), start=1)]


@dataclass(frozen=True)
class Part:
    """A component of a pipeline, or a picture of a row, given by a tag of a table."""

    kind: str
    arguments: Mapping[str, Any]

    def build(self, rule: Mapping[str, Any] | None = None) -> Any:
        """Build it; `rule` holds the arguments of `fill`."""
        given = {name: value for name, value in self.arguments.items() if not name.startswith("_")}
        kind = find(given.pop("kind", self.kind)) if self.kind[0].isupper() else find(self.kind)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            made = kind(kind.config_class(**given))
        else:
            made = kind(**given)
        if not isinstance(made, torch.nn.Module):
            return made
        if "_config" in self.arguments:
            made.register_to_config(**self.arguments["_config"])
        for pattern, std in self.arguments.get("_normal", {}).items():
            for name, tensor in (*made.named_parameters(), *made.named_buffers()):
                if pattern in f".{name}":
                    torch.nn.init.normal_(tensor, std=std)
        if rule:
            fill(made, **rule)
        if "_dtype" in self.arguments:
            made.to(getattr(torch, self.arguments["_dtype"]))
        return made.eval()


def find(name: str) -> Any:
    """Return a function or class by its path, or by its name in `parts`, diffusers or transformers."""
    module, _, last = name.rpartition(".")
    if module:
        return getattr(importlib.import_module(module), last)
    return next(getattr(place, name) for place in (_parts(), diffusers, transformers) if hasattr(place, name))


@cache
def _parts() -> Any:
    return importlib.import_module("zoo.parts")


@torch.no_grad()
def fill(model: torch.nn.Module, zeros: float, scale: float = 1.0, *, matrices: bool = False) -> None:
    """Draw all-zero parameters with a standard deviation, and scale the rest but for vectors, so that each input matters.

    Args:
        zeros: the standard deviation.
        matrices: scale matrices alone.
    """
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=zeros)
        elif parameter.ndim == 2 or (parameter.ndim > 2 and not matrices):
            parameter *= scale


@torch.no_grad()
def redraw(pipeline: DiffusionPipeline) -> None:
    """Draw all weights of a pipeline again, large enough that its output depends on every input."""
    for part in pipeline.components.values():
        for parameter in part.parameters() if isinstance(part, torch.nn.Module) else ():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
            elif not parameter.any():
                torch.nn.init.normal_(parameter, std=0.05)


def build_pipeline(
    name: str, parts: Mapping[str, Any], fill: Any, attributes: Mapping[str, Any], **change: Mapping[str, Any]
) -> DiffusionPipeline:
    """Build a pipeline with the same random weights each time; a control network is built first.

    Args:
        name: of its class.
        fill: `all` to redraw all weights, or `parts` to `fill`, with its arguments.
        attributes: set in the finished pipeline.
        change: arguments by part.
    """
    rule = {} if fill == "all" else {key: value for key, value in fill.items() if key != "parts"}
    components = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for key in sorted(parts, key=lambda key: key != "controlnet"):
            part = parts[key]
            if isinstance(part, Part):
                part = replace(part, arguments={**part.arguments, **change.get(key, {})})
                own = part.arguments.get("_fill", bool(rule) and key in fill["parts"])
                part = part.build(rule if own is True else own)
            components[key] = part
        pipeline = find(name)(**components)
        if fill == "all":
            redraw(pipeline)
    for key, value in attributes.items():
        setattr(pipeline, key, value)
    return pipeline


def picture(seed: int = 0, width: int = 32, height: int = 32, mode: str = "RGB") -> Image.Image:
    """Return a picture of coloured noise, smooth enough to survive resizing."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


class Loader(yaml.SafeLoader):
    """Reads tables, with a `Part` for each tag and tuples for `!tuple`."""


Loader.add_multi_constructor("!", lambda self, kind, node: Part(kind, self.construct_mapping(node, deep=True)))
Loader.add_constructor("!tuple", lambda self, node: tuple(self.construct_sequence(node, deep=True)))


def load_specimens(file: Path) -> dict[str, Specimen]:
    """Return the specimens of a table by name."""
    table, specimens = yaml.load(file.read_text(), Loader), {}
    for name, own in table["specimens"].items():
        likes = own.get("like", [])
        parts = dict(own.get("with", {}))
        for like in [likes] if isinstance(likes, str) else likes:
            parts |= {key: part for key, part in table["sets"][like].items() if key not in parts}
        build = partial(
            build_pipeline,
            name.partition(" ")[0],
            parts,
            own.get("fill", table["fill"]),
            own.get("set", {}),
            **own.get("change", {}),
        )
        prompts = {"prompts": tuple(own["prompts"])} if "prompts" in own else {}
        specimens[name] = Specimen(build, own["task"], own["call"], _build_columns(own.get("columns", {})), **prompts)
    return specimens


def _build_columns(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _build_columns(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_build_columns(item) for item in value]
    return value.build() if isinstance(value, Part) else value
