"""Arguments of a pipeline's call; they are read from diffusers' source if possible, which is faster than importing it."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flowgrpo.errors import InputError
from rewards.base import nearest

# Call arguments that flowgrpo sets; a config must not.
RESERVED = (
    "prompt",
    "latents",
    "generator",
    "output_type",
    "return_dict",
    "num_images_per_prompt",
    "sigmas",
    "timesteps",
)
SIZES = ("height", "width", "num_frames")  # these are numbers, even if their default is None
MOST_STEPS = 10_000  # more would make a plan slow, since it builds the tree of all steps
GUIDED = "do_classifier_free_guidance"
# Values that switch guidance arguments off; None removes one from the call.
OFF = {
    "true_cfg_scale": 1.0,
    "guidance_scale": 1.0,
    "guidance_scale_2": None,
    "audio_guidance_scale": 1.0,
    "img_guidance_scale": 1.0,
    "stg_scale": 0.0,
    "audio_stg_scale": 0.0,
    "modality_scale": 1.0,
    "audio_modality_scale": 1.0,
    "pag_scale": 0.0,
    "negative_prompt": None,
}


@cache
def outline(name: str) -> type | None:
    """Return a stand-in for a diffusers pipeline class, built from its source, because importing the class takes seconds.

    It has the class's name, a call with the same arguments that does nothing, the property `do_classifier_free_guidance`,
    and an `encode_prompt` if the class has one. Returns None if the source is not enough: the class inherits from another
    pipeline, a default is no literal, or the property reads other names than `self`.
    """
    node = _class_node(name)
    if node is None or not all(map(_is_plain_base, node.bases)):
        return None
    methods = {method.name: method for method in node.body if isinstance(method, ast.FunctionDef)}
    call, guided = methods.get("__call__"), methods.get(GUIDED)
    if call is None or not all(map(_is_literal, (*call.args.defaults, *filter(None, call.args.kw_defaults)))):
        return None
    call.body, call.decorator_list = [ast.Pass()], []
    node.bases, node.keywords, node.decorator_list, node.body = [], [], [], [call]
    if guided is not None:
        names = {inner.id for inner in ast.walk(ast.Module(guided.body, [])) if isinstance(inner, ast.Name)}
        if names - {"self"} or [getattr(mark, "id", None) for mark in guided.decorator_list] != ["property"]:
            return None
        node.body.append(guided)
    if "encode_prompt" in methods:
        node.body += ast.parse("encode_prompt = None").body
    namespace: dict[str, Any] = {}
    tree = ast.fix_missing_locations(ast.Module([node], []))
    # Annotations name classes that are not imported here; as strings they are not evaluated.
    exec(compile(tree, f"outline of {name}", "exec", flags=annotations.compiler_flag), namespace)
    return namespace[name]


def _class_node(name: str) -> ast.ClassDef | None:
    """Find the definition of a class among the files of diffusers' pipelines."""
    spec = find_spec("diffusers")
    assert spec is not None
    root = Path(str(spec.origin)).parent
    if f'"{name}"' not in (root / "__init__.py").read_text(encoding="utf-8"):
        return None
    for file in sorted((root / "pipelines").glob("*/*.py")):
        text = file.read_text(encoding="utf-8")
        if f"\nclass {name}(" in text:
            return next(n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == name)
    return None


def _is_plain_base(base: ast.expr) -> bool:
    return isinstance(base, ast.Name) and (base.id == "DiffusionPipeline" or base.id.endswith("Mixin"))


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def check_call(pipeline: type, call: dict[str, Any], key: str = "model.call") -> dict[str, Any]:
    """Return a copy of `call` if the pipeline takes all of its arguments; errors name `key`, its place in the config.

    Raise InputError if an argument is unknown, has a wrong value, or is set by flowgrpo.
    """
    known = inspect.signature(inspect.unwrap(pipeline.__call__)).parameters
    for name in call:
        if name in RESERVED:
            raise InputError(f"{key}.{name}: set by flowgrpo itself, remove it")
        if name not in known:
            choices = [k for k in known if k not in RESERVED and k != "self"]
            near = nearest(name.rpartition(".")[2], choices)
            raise InputError(f"{key}.{name}: {pipeline.__name__} has no such argument, {near}")
    for name, value in call.items():
        default = known[name].default
        numeric = isinstance(default, int | float) and not isinstance(default, bool) and name != "num_inference_steps"
        if (numeric and isinstance(value, str | bool)) or (name in SIZES and isinstance(value, bool)):
            raise InputError(
                f"{key}.{name}: {value!r} is no number, {f'take {default}' if numeric else 'leave it out'}"
            )
    steps = call.get("num_inference_steps")
    if steps is not None and not (isinstance(steps, int) and 0 < steps <= MOST_STEPS):
        raise InputError(f"{key}.num_inference_steps: {steps!r} is not a number of steps from 1 to {MOST_STEPS}")
    return dict(call)


def unguided(pipeline: type, embedded: bool = False) -> dict[str, Any]:
    """Return the call arguments that switch a pipeline's guidance off; None stands for an argument to remove.

    With `embedded`, `guidance_scale` is an input of the transformer (guidance-distilled) and stays.
    """
    takes = inspect.signature(inspect.unwrap(pipeline.__call__)).parameters
    off = {name: value for name, value in OFF.items() if name in takes}
    declared = getattr(pipeline, "do_classifier_free_guidance", None)
    if embedded or ("true_cfg_scale" in takes and declared is None):
        off.pop("guidance_scale", None)
    elif isinstance(declared, property):
        try:
            if declared.__get__(SimpleNamespace(_guidance_scale=1.0, guidance_scale=1.0)):
                off["guidance_scale"] = 0.0  # for cond + guidance_scale * (cond - uncond)
        except AttributeError:  # it reads more than the scale
            pass
    return off
