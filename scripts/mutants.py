"""Make one wrong change of the code at a time and run the nearest tests: which changes does no test see?

    python scripts/mutants.py [--only TEXT] [--jobs 1]

The changes are in scripts/mutants.yaml: of each file its nearest tests, and changes `before => after` of a text that the
file has once. An entry may also be a map of `change` and `same`, the reason why it changes nothing that could be seen; such
a one is not tried. Everything happens in a copy of the tree, and the tests must pass there before anything is changed.
Prints survivors as they are found and a table at the end. Exit status 1 if there is a survivor; docs/reliability.md has the
figures.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

import pytest
import yaml

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "scripts" / "mutants.yaml"
COPIED = ("configs", "docs", "flowgrpo", "rewards", "samplers", "scripts", "tests", "pyproject.toml")
ARROW = " => "
SLOWEST = 300.0  # seconds; a change by which a loop never ends is seen by its test
PASSED, FAILED, BROKEN = 0, 1, 2  # what pytest returns: all passed, one failed, and one could not be collected

# Processes that have imported what takes longest, but nothing of ours.
SERVED = multiprocessing.get_context("forkserver")
SERVED.set_forkserver_preload(
    ["torch", "diffusers.schedulers", "transformers", "peft", "accelerate", "pydantic", "pytest"]
)


@dataclass(frozen=True)
class Mutant:
    """A wrong change of a file.

    Attributes:
        file: its path in the tree.
        before, after: a text that is in it once, and what takes its place.
        tests: the nearest tests' files.
        same: why nothing could be seen of the change; None where something could.
    """

    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    same: str | None = None

    def __str__(self) -> str:
        return f"{self.file}: {self.before}{ARROW}{self.after}"

    def applied(self, text: str) -> str:
        """The file's text with the change.

        Raises:
            ValueError: what is to be changed is not there, or more than once.
        """
        if text.count(self.before) != 1:
            raise ValueError(f"{self.file}: {self.before!r} is there {text.count(self.before)} times, not once")
        return text.replace(self.before, self.after)


def read(table: Path, root: Path, only: str = "") -> list[Mutant]:
    """The changes of a table whose line contains a text.

    Raises:
        ValueError: one of them, whichever are asked for, does not fit its file, or a test's file is missing.
    """
    found = []
    for file, entry in yaml.safe_load(table.read_text()).items():
        text = (root / file).read_text()
        for test in entry["tests"]:
            if not (root / test).exists():
                raise ValueError(f"{file}: its test {test} is missing")
        for change in entry["changes"]:
            written, same = (change, None) if isinstance(change, str) else (change["change"], change["same"])
            before, _, after = written.partition(ARROW)
            mutant = Mutant(file, before, after, tuple(entry["tests"]), same)
            mutant.applied(text)
            found.append(mutant)
    return [mutant for mutant in found if only in str(mutant)]


def copied(root: Path, folder: str | Path) -> Path:
    """A copy of what the tests need of a tree, in an empty folder."""
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (root / name).exists():
            shutil.copy(root / name, folder)
    return Path(folder)


def tested(tree: Path, tests: Sequence[str]) -> bool:
    """Whether tests pass in a tree.

    Raises:
        RuntimeError: they could not be run.
    """
    process = SERVED.Process(target=_test, args=(tree, tests))
    process.start()
    process.join(SLOWEST)
    if process.exitcode is None:
        process.kill()
        process.join()
        return False
    if process.exitcode not in (PASSED, FAILED, BROKEN):
        raise RuntimeError(f"pytest {' '.join(tests)} ended with {process.exitcode}")
    return process.exitcode == PASSED


def _test(tree: Path, tests: Sequence[str]) -> None:
    """Run tests in a tree as a process of its own, in silence."""
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path.insert(0, str(tree))
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    sys.exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])))


def survives(mutant: Mutant, tree: Path) -> bool:
    """Whether the nearest tests pass with a change, which is undone again."""
    file = tree / mutant.file
    text = file.read_text()
    stale = Path(cache_from_source(file))  # bytecode, which a change of the same length in the same second would keep
    try:
        file.write_text(mutant.applied(text))
        stale.unlink(missing_ok=True)
        return tested(tree, mutant.tests)
    finally:
        file.write_text(text)
        stale.unlink(missing_ok=True)


def tried(mutants: Sequence[Mutant], root: Path) -> list[Mutant]:
    """Those of some changes that survive, each of which is told at once; all of them are tried in one copy of the tree.

    Raises:
        RuntimeError: the nearest tests of one fail without any change.
    """
    survivors = []
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        tree = copied(root, folder)
        for tests in dict.fromkeys(mutant.tests for mutant in mutants):
            if not tested(tree, tests):
                raise RuntimeError(f"{' '.join(tests)}: they fail without any change")
        for mutant in mutants:
            if survives(mutant, tree):
                survivors.append(mutant)
                print(f"survives {mutant}", flush=True)
    return survivors


def main(arguments: list[str] | None = None, *, root: Path = ROOT, table: Path = TABLE) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a text that the file or the change contains")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree that are worked on at a time")
    options = parser.parse_args(arguments)
    begun, chosen = time.monotonic(), read(table, root, options.only)
    mutants = [mutant for mutant in chosen if mutant.same is None]
    with ThreadPoolExecutor(options.jobs) as pool:
        parts = [mutants[i :: options.jobs] for i in range(options.jobs)]
        survivors = [mutant for part in pool.map(lambda own: tried(own, root), parts) for mutant in part]
    counts, alive = (Counter(mutant.file for mutant in each) for each in (mutants, survivors))
    print("| file | tried | survive |\n|---|---|---|")
    for file, count in counts.items():
        print(f"| {file} | {count} | {alive[file]} |")
    print(
        f"{len(mutants)} wrong changes, {len(survivors)} survive, {len(chosen) - len(mutants)} that change nothing are left "
        f"out; {(time.monotonic() - begun) / 60:.0f} min"
    )
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
