"""What the call of a pipeline takes; read from diffusers' source, where that tells, before diffusers is imported."""

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

# Arguments of a pipeline's call that are set here, and by no config.
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
SIZES = ("height", "width", "num_frames")  # numbers also where their default is None
MOST_STEPS = 10_000  # a plan grows a tree of them
GUIDED = "do_classifier_free_guidance"
# What switches a guidance argument of diffusers' pipelines off; None leaves it out of the call.
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
    """Return a stand-in for a diffusers pipeline class, with its name, its call's arguments, whether it is guided, and
    whether it encodes prompts apart.

    To import such a class takes seconds; what a plan asks of it stands in its own file. The call does nothing; whether it is
    guided is the pipeline's own property. None where the file does not tell: the class inherits from another pipeline, a
    default is no plain value, or the property looks at more than the pipeline.
    """
    node = _class_node(name)
    if node is None or any(not _plain(base) for base in node.bases):
        return None
    methods = {method.name: method for method in node.body if isinstance(method, ast.FunctionDef)}
    if "__call__" not in methods:
        return None
    call, guided = methods["__call__"], methods.get(GUIDED)
    taken = call.args
    if not all(map(_literal, (*taken.defaults, *filter(None, taken.kw_defaults)))):
        return None
    call.body, call.decorator_list = [ast.Pass()], []
    kept = [call]
    if guided is not None:
        names = {inner.id for inner in ast.walk(ast.Module(guided.body, [])) if isinstance(inner, ast.Name)}
        if names - {"self"} or [getattr(mark, "id", None) for mark in guided.decorator_list] != ["property"]:
            return None
        kept.append(guided)
    if "encode_prompt" in methods:
        encoding = ast.parse("def encode_prompt(self): ...")
        kept += [method for method in encoding.body if isinstance(method, ast.FunctionDef)]
    for method in kept:
        method.returns = None
        for argument in (*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs):
            argument.annotation = None
        for rest in filter(None, (method.args.vararg, method.args.kwarg)):
            rest.annotation = None
    node.bases, node.keywords, node.decorator_list, node.body = [], [], [], [*kept]
    made: dict[str, Any] = {}
    tree = ast.fix_missing_locations(ast.Module([node], []))
    exec(compile(tree, f"the outline of {name}", "exec"), made)
    return made[name]


def _class_node(name: str) -> ast.ClassDef | None:
    """The definition of a class that diffusers offers, in the one file of its pipelines that has it."""
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


def _plain(base: ast.expr) -> bool:
    """Whether a base class says nothing of a call."""
    return isinstance(base, ast.Name) and (base.id == "DiffusionPipeline" or base.id.endswith("Mixin"))


def _literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def checked_call(pipeline: type, call: dict[str, Any], key: str = "model.call") -> dict[str, Any]:
    """Return `call` if the pipeline takes all of its arguments; errors name `key`, where it stands in the config.

    Raises:
        InputError: an unknown argument, or one that is set by flowgrpo.
    """
    known = inspect.signature(inspect.unwrap(pipeline.__call__)).parameters
    for name in call:
        if name in RESERVED:
            raise InputError(f"{key}.{name}: set by flowgrpo itself, remove it")
        if name not in known:
            choices = [k for k in known if k not in RESERVED and k != "self"]
            raise InputError(f"{key}.{name}: {pipeline.__name__} has no such argument, {nearest(name, choices)}")
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
    """The call arguments that switch a pipeline's guidance off, None for one to be left out.

    Args:
        pipeline: the class.
        embedded: whether `guidance_scale` is an input of its transformer (guidance-distilled models); it stays as it is.
    """
    takes = inspect.signature(inspect.unwrap(pipeline.__call__)).parameters
    off = {name: value for name, value in OFF.items() if name in takes}
    declared = getattr(pipeline, "do_classifier_free_guidance", None)
    if embedded or ("true_cfg_scale" in takes and declared is None):
        off.pop("guidance_scale", None)
    elif isinstance(declared, property):
        try:
            if declared.__get__(SimpleNamespace(_guidance_scale=1.0, guidance_scale=1.0)):
                off["guidance_scale"] = 0.0  # pipelines that add guidance_scale * (cond - uncond) to cond
        except AttributeError:  # it reads more of the pipeline than its scale
            pass
    return off
