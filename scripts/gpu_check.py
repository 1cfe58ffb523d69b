"""Check training on a GPU and measure what it takes there, in one command of a few minutes on a bare machine.

    python scripts/gpu_check.py [--minutes 9] [--json gpu_check.json] [--packages FOLDER] [--only WORD] [--again]
    python scripts/gpu_check.py --show gpu_check.json        # the results as tables in Markdown, on any machine
    python scripts/gpu_check.py --shrunk                     # everything at a tiny size, on a CPU

In this order:

 1. Correctness, of the embedded model and of a small Stable Diffusion 3: the largest |log ratio| before an optimizer step in
    float32 and bfloat16, also of rollouts by CUDA graphs (`model.cuda_graphs`), blocks compiled (`model.compile`) against
    eager ones, and a run that is killed and resumed.
 2. Speed, of the shapes of SD3.5-medium, FLUX.1, Wan 1.3B and LLaDA-8B with random weights in bfloat16: rollout, update and
    decoding of 8 samples in 3 steps (LLaDA: 16), with 8, 4, 2 and 1 rows per call and with one lever at a time: kept graphs,
    CUDA graphs, attention backends that are installed, compiled blocks, a cache of keys and values.
 3. ODE steps of 8 samples of the flow models by copies of their linear layers in int8 and fp8, eager and compiled.
 4. What `flowgrpo plan` counts of the same iterations. This needs no GPU: without one the command measures this alone.

Each result is in the JSON file as soon as it is measured. A second call skips what is there; with `--again` it measures
failed parts anew. A part begins only if its expected time fits into `--minutes`. A part that raises, hangs or ends its
process is recorded with its error, and the others go on.

PyTorch must be installed. `--packages` puts a folder in front of Python's path, for a machine that can fetch nothing.
Wheels in it are unpacked to a temporary folder. Fill it elsewhere for that machine's Python, with packages (110 MiB) or, to
stay under 64 MiB with this repository, with wheels (28 MiB):

    uv pip install --target FOLDER --python-version 3.12 --no-deps PACKAGE ...
    pip download --dest FOLDER --python-version 3.12 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \\
        --only-binary :all: --no-deps PACKAGE ...

PACKAGE ... are diffusers, transformers, peft, accelerate, huggingface_hub, httpx2, httpcore2, truststore, pydantic and the
pydantic_core that it asks for, annotated_types, typing_inspection, tokenizers, safetensors, ftfy and wcwidth. Leave out what
the machine has in the versions of pyproject.toml, as often accelerate, tokenizers and safetensors; torchvision, scipy,
jinja2, psutil, pyyaml, rich and regex must be there too. One file holds the results of one machine.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import itertools
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "research")]

from gpu_parts.session import Part, Results, run  # noqa: E402

ROWS = (8, 4, 2, 1)
SD3, LLADA = "sd35-medium", "llada-8b"
# Twice the seconds that `flowgrpo plan` says of an iteration in calls of one row on an H200.
MODELS = {SD3: 18, "flux1-dev": 25, "wan21-1.3b": 40, LLADA: 33}
BUILD, COMPILE, OTHER = 15, 90, 5  # seconds, guesses: of building a model, of compiling it, and beside an iteration
# Attention backends with the package that each needs. SD3's attention cannot be set.
BACKENDS = {"_native_flash": None, "_native_efficient": None, "flash": "flash_attn", "_flash_3": "flash_attn_interface"}
BACKENDS |= {"xformers": "xformers"}
LAST = "_native_cudnn"  # it may end the process


def part(
    title: str, seconds: float, function: str, labels: Mapping[str, Any], *, gpu: bool = True, **given: Any
) -> Part:
    """Return the part that calls `gpu_parts.MODULE.FUNCTION`; `labels` stand in its result, for `--show`."""
    module, _, called = function.partition(".")

    def measure() -> dict[str, Any]:
        return {**labels, **getattr(importlib.import_module(f"gpu_parts.{module}"), called)(**given)}

    return Part(title, seconds, measure, gpu)


def parts(*, shrunk: bool) -> list[Part]:
    """Return all parts in their order; with `shrunk`, at a tiny size and without a need for a GPU."""
    return [*checks(shrunk=shrunk), *speeds(shrunk=shrunk), *finishes(shrunk=shrunk), *plans(shrunk=shrunk)]


def checks(*, shrunk: bool) -> Iterator[Part]:
    """Yield the machine and the parts that check correctness."""
    yield part("machine", 2, "iteration.machine", {"kind": "machine"}, gpu=not shrunk)
    both, single = ("float32", "bfloat16"), ("float32",)
    for check, seconds, function, dtypes, given in (
        ("log ratio", 10, "correctness.log_ratio", both, {}),
        ("CUDA graphs", 10, "correctness.log_ratio", both, {"captured": True}),
        ("killed and resumed", 50, "correctness.resumed", single, {}),
        ("compiled", 60, "correctness.log_ratio", single, {"compiled": True}),
    ):
        for model, dtype in itertools.product(("shapes", "small SD3"), dtypes):
            title = f"{model}, {dtype}: {check}"
            labels = {"kind": "check", "model": model, "dtype": dtype, "check": check}
            given = {**given, "name": model, "dtype": dtype, "shrunk": shrunk}
            yield part(title, seconds, function, labels, gpu=not shrunk or "captured" in given, **given)


def speeds(*, shrunk: bool) -> Iterator[Part]:
    """Yield the parts that measure speed: for each model calls of several rows, then its levers."""
    rows = (2, 1) if shrunk else ROWS

    def speed(model: str, lever: str, count: int, more: float = 0, **given: Any) -> Part:
        labels = {"kind": "speed", "model": model, "lever": lever, "rows": count}
        function, own = ("text.measured", {}) if model == LLADA else ("flow.measured", {"name": model})
        name, seconds = f"{model}: {lever}, {count} rows", MODELS[model] / count + OTHER + more
        gpu = not shrunk or "captured" in given
        return part(name, seconds, function, labels, gpu=gpu, rows=count, shrunk=shrunk, **own, **given)

    there = [name for name, package in BACKENDS.items() if package is None or importlib.util.find_spec(package)]
    flow = [model for model in MODELS if model != LLADA]
    for model in flow:
        for count in rows:
            yield speed(model, "eager", count, BUILD * (count == rows[0]))
        yield speed(model, "kept graphs", rows[0], graphs=True)
        yield speed(model, "CUDA graphs", rows[0], captured=True)
        for name in there if model != SD3 and not shrunk else ():
            yield speed(model, f"attention {name}", rows[0], attention=name)
        yield speed(model, "compiled", rows[0], COMPILE, compiled=True)
    yield speed(SD3, "compiled, CUDA graphs", rows[0], BUILD + COMPILE, compiled=True, captured=True)
    for count in rows:
        yield speed(LLADA, "eager", count, BUILD)
    yield speed(LLADA, "dual cache", rows[0], BUILD, cache="dual")
    for model in flow if not shrunk else ():
        if model != SD3:
            yield speed(model, f"attention {LAST}", rows[0], BUILD, attention=LAST)


def finishes(*, shrunk: bool) -> Iterator[Part]:
    """Yield the parts that measure finishes in low precision."""
    rows = 2 if shrunk else ROWS[0]
    for model, compiled in itertools.product([each for each in MODELS if each != LLADA], (False, True)):
        labels = {"kind": "finish", "model": model, "rows": rows, "compiled": compiled}
        seconds = BUILD + OTHER + MODELS[model] / rows + 3 * COMPILE * compiled
        given = {"name": model, "rows": rows, "compiled": compiled, "shrunk": shrunk}
        yield part(
            f"{model}: finish" + " compiled" * compiled, seconds, "flow.finished", labels, gpu=not shrunk, **given
        )


def plans(*, shrunk: bool) -> Iterator[Part]:
    """Yield the parts that count the operations of the same iterations."""
    rows = (2, 1) if shrunk else ROWS
    for model in MODELS:
        function, own = ("text.planned", {}) if model == LLADA else ("flow.planned", {"name": model})
        labels = {"kind": "plan", "model": model}
        yield part(f"{model}: plan", 30, function, labels, gpu=False, rows=rows, shrunk=shrunk, **own)


@contextlib.contextmanager
def packages(folder: Path | None) -> Iterator[None]:
    """Put a folder of packages or wheels in front of Python's path inside this context."""
    with tempfile.TemporaryDirectory() as unpacked:
        if folder is not None:
            for wheel in folder.glob("*.whl"):
                zipfile.ZipFile(wheel).extractall(unpacked)
            sys.path[:0] = [unpacked, str(folder.resolve())]
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no part that would end later; 9 by default")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), metavar="FILE", help="gets the results")
    parser.add_argument("--packages", type=Path, metavar="FOLDER", help="packages or wheels that this machine lacks")
    parser.add_argument("--only", metavar="WORD", help="parts whose name has this word in it")
    parser.add_argument("--again", action="store_true", help="measure failed parts anew")
    parser.add_argument("--shrunk", action="store_true", help="at a tiny size, on a CPU")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the results of a file, measure nothing")
    options = parser.parse_args(arguments)
    for file in (options.packages, options.show):
        if file is not None and not file.exists():
            parser.error(f"{file} does not exist")
    with packages(options.packages):
        chosen = [each for each in parts(shrunk=options.shrunk) if (options.only or "") in each.name]
        if not chosen:
            parser.error(
                f"--only {options.only}: in no part's name, as 'log ratio', 'flux1-dev', 'eager' and 'plan' are"
            )
        results = Results(options.show or options.json)
        if options.show is None:
            run(chosen, results, minutes=options.minutes, again=options.again)
        page = importlib.import_module("gpu_parts.page")
        told = results.read()["parts"]
        print(page.tables(told))
    return int(options.show is None and any("error" in each for each in told.values()))


if __name__ == "__main__":
    sys.exit(main())
