"""Broken folders of models, through the plan of a run and through sampling, which loads what is not refused.

A case is one of the two embedded models, a variant that is asked for, and a few things that are done to copies of its files:
they are cut off, emptied, taken away, renamed, exchanged, made links to nothing or Git LFS pointers, sharded, pickled, given
a variant's name, or other JSON.
"""

import contextlib
import io
import json
import shutil
import tempfile
from pathlib import Path

import broken
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from flowgrpo.cli import main
from flowgrpo.data.embedded import EMBEDDED
from fuzzing.runner import Summary, refusal, run

MODEL = "m"
CALLS = {
    "shapes": ["num_inference_steps=1", "height=32", "width=32", "max_sequence_length=1", "guidance_scale=1.0"],
    "digits": ["length=2"],
}
CONFIGS = {
    "shapes": "model: {path: m, call: {num_inference_steps: 1, height: 32, width: 32}}\nalgorithm: {preset: rwr}\n",
    "digits": "kind: mdlm\nmodel: {path: m, length: 2}\n",
}
VARIANTS = (None, None, None, "fp16", "bf16")
JSON = (
    "", "{", "[]", "null", "3", '{"_class_name": []}', '{"model_type": "x"}', '{"weight_map": {"a": "../b"}}',
    "[" * 9000,
)  # fmt: skip
Damage = tuple[str, str, int]  # what is done, to which file, by a number
Case = tuple[str, str | None, list[Damage]]


def weights(file: Path) -> bool:
    with contextlib.suppress(OSError, SafetensorError), safe_open(file, "pt"):
        return file.suffix == ".safetensors"
    return False


def damage(folder: Path, what: str, name: str, number: int) -> None:
    """Damage a file of a model or its folder; do nothing where an earlier damage took it away."""
    file = folder / name
    if what == "network":
        return broken.keep_network(folder, file.parent.name) if file.parent != folder and file.parent.is_dir() else None
    if not file.is_file():
        return None
    match what:
        case "cut":
            broken.cut(file, number / 100)
        case "bytes":
            content = bytearray(file.read_bytes())
            for place in range(number % 7, min(len(content), 400), 7):
                content[place] = (content[place] + number) % 256
            broken.write(file, bytes(content))
        case "point":
            broken.point(file)
        case "remove":
            file.unlink()
        case "rename":
            file.rename(file.with_name(f"{file.stem}x{file.suffix}"))
        case "link":
            file.unlink()
            file.symlink_to(folder / "gone")
        case "folder":
            file.unlink()
            file.mkdir()
        case "json":
            broken.write(file, JSON[number % len(JSON)])
        case "empty":
            broken.empty(file.parent)
        case "lose":
            shutil.rmtree(file.parent)
        case "variant" if weights(file):
            file.rename(file.with_name(f"{file.stem}.{('fp16', 'bf16')[number % 2]}.safetensors"))
        case "shard" | "lost" | "index" | "cut shard" if weights(file):
            shards = broken.shard(file, 2, (None, "fp16")[number % 2])
            index = next(file.parent.glob("*.index*json"))
            if what == "lost":
                shards[number % 2].unlink()
            elif what == "index":
                index.write_text(json.dumps({"weight_map": {"a": ("x", "", "/etc/passwd")[number % 3]}}))
            elif what == "cut shard":
                broken.cut(shards[1], number / 100)
        case "pickle" | "cut pickle" if weights(file):
            pickled = broken.pickle(file, zipped=number % 2 == 0)
            if what == "cut pickle":
                broken.cut(pickled, number / 100)
    return None


WAYS = (
    *("cut", "bytes", "point", "remove", "rename", "link", "folder", "json", "empty", "lose", "network"),
    *("lost", "index", "cut shard", "cut pickle"),
    *("variant", "shard", "pickle") * 2,  # which leave a whole model
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a model, a variant and damages to its files."""
    kind = draw(st.sampled_from(sorted(CALLS)))
    place = EMBEDDED[kind].folder
    files = sorted(str(file.relative_to(place)) for file in place.rglob("*") if file.is_file())
    heavy = [name for name in files if name.endswith(".safetensors")]
    which = st.sampled_from(files) | st.sampled_from(heavy)
    every = st.just([("variant", name, 0) for name in heavy])  # a whole model of a variant
    some = st.lists(st.tuples(st.sampled_from(WAYS), which, st.integers(0, 99)), max_size=2)
    return kind, draw(st.sampled_from(VARIANTS)), draw(some | st.builds(list.__add__, every, some))


def said_by(words: list[str]) -> str | None:
    """Run a command; return its refusal, or None."""
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        status = main(words)
    return refusal(status, err.getvalue().splitlines()[-1]) if status else None


def attempt(case: Case) -> str | None:
    """Plan a run of a folder and sample from it; return None if it can be sampled from."""
    kind, variant, damages = case
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        broken.copied(EMBEDDED[kind].folder, MODEL)
        for each in damages:
            if Path(MODEL).is_dir():
                damage(Path(MODEL), *each)
        Path("c.yaml").write_text(CONFIGS[kind])
        chosen, option = ([], []) if variant is None else ([f"model.variant={variant}"], ["--variant", variant])
        plan = said_by(["plan", "c.yaml", "--format", "json", *chosen])
        said = said_by(["sample", MODEL, "--prompt", "1", "--out", "o", *option, *CALLS[kind]])
        assert plan is None or said is not None, f"sampled from, and refused by the plan: {plan!r}"
        return said


def fuzz(seed: int, count: int) -> Summary:
    for kind in CALLS:  # the first case is not to wait for imports
        assert attempt((kind, None, [])) is None
    return run("folders", cases(), attempt, seed, count)
