"""Build the sdist and the wheel, check that they are complete, and run commands from the wheel alone.

    python scripts/check_dist.py dist

The wheel is installed without dependencies into a new environment, which uses the dependencies of the current one. Run
it from the repository's root, in an environment with uv; the build downloads setuptools.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from sysconfig import get_path

PACKAGES = ("flowgrpo", "rewards", "samplers")
CONFIG = """
model: {path: shapes, call: {num_inference_steps: 4}}
prompts: {train: "shapes:train", eval: "shapes:eval"}
rewards: [{use: shapes}]
algorithm: {preset: flow_grpo_fast}
train: {iterations: 1, groups: 2, group_size: 4}
eval: {prompts: 4}
run: {name: demo}
"""
COMMANDS = [
    ["--version"],
    ["init"],
    ["init", "flux1-24gb", "--out", "a.yaml"],
    ["plan", "a.yaml", "--gpu-memory", "24"],
    ["rewards"],
    ["models"],
    ["plan", "demo.yaml"],
    ["train", "demo.yaml"],
    ["gallery", "runs/demo"],
    ["export", "runs/demo", "--out", "lora"],
    ["sample", "shapes", "--prompt", "a red circle", "--out", "pictures"],
    ["evaluate", "shapes", "--set", "geneval", "--reward", "jpeg_size", "--limit", "2", "--samples", "1"],
    ["doctor", "shapes"],
]
SAID = {"plan a.yaml --gpu-memory 24": "fits 24.0 GiB"}  # expected output; the status is 0 in any case


def build(out: Path) -> tuple[Path, Path]:
    """Build the sdist and the wheel into an empty or missing folder."""
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"{out} holds something already, remove it")
    subprocess.run([sys.executable, "-m", "uv", "build", "--quiet", "--out-dir", out], check=True)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def missing(sdist: Path, wheel: Path) -> list[str]:
    """Return sentences about tracked files that the sdist lacks, and files of packages that the wheel lacks."""
    known = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    of_packages = {name for name in known if name.startswith(tuple(f"{package}/" for package in PACKAGES))}
    return [
        *(f"{sdist.name} lacks {name}" for name in known if name not in in_sdist),
        *(f"{wheel.name} lacks {name}" for name in sorted(of_packages - in_wheel)),
    ]


def run_commands(wheel: Path, place: Path, commands: Sequence[Sequence[str]] = COMMANDS) -> None:
    """Install the wheel into `place` and run commands in an empty folder there. Raises CalledProcessError or SystemExit."""
    environment, folder = place / "venv", place / "empty"
    folder.mkdir()
    (folder / "demo.yaml").write_text(CONFIG)
    uv = [sys.executable, "-m", "uv"]
    python = environment / "bin" / "python"
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, environment], check=True)
    install = [*uv, "pip", "install", "--quiet", "--no-deps", "--python", python, wheel.resolve()]
    subprocess.run(install, check=True)
    asked = [python, "-c", "from sysconfig import get_path; print(get_path('purelib'))"]
    packages = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    # .pth files in a folder that a .pth file adds are ignored, so an editable flowgrpo there has no effect.
    (packages / "dependencies.pth").write_text(f"{get_path('purelib')}\n")
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for command in commands:
        print("flowgrpo", *command, flush=True)
        program = [environment / "bin" / "flowgrpo", *command]
        said = subprocess.run(program, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True, check=True).stdout
        expected = SAID.get(" ".join(command), "")
        if expected not in said:
            raise SystemExit(f"flowgrpo {' '.join(command)} did not say: {expected}")
    asked = [python, "-c", "import flowgrpo; print(flowgrpo.__file__)"]
    used = subprocess.run(asked, cwd=folder, env=variables, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(used).is_relative_to(environment):
        raise SystemExit(f"the commands were those of {used}, not of the wheel")


def main() -> None:
    """Build, check and run; exit with status 1 on any failure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="an empty or missing folder for the sdist and the wheel")
    sdist, wheel = build(parser.parse_args().out)
    if lacking := missing(sdist, wheel):
        raise SystemExit("\n".join(lacking))
    with tempfile.TemporaryDirectory() as place:
        run_commands(wheel, Path(place))
    print(f"{sdist} and {wheel} are whole")


if __name__ == "__main__":
    main()
