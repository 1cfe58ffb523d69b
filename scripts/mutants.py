"""Apply wrong changes to the code, one at a time, and run the nearest tests: which changes go unnoticed?

    python scripts/mutants.py [--only TEXT] [--jobs 1]

For each file, scripts/mutants.yaml lists its nearest tests and changes `before => after`; `before` occurs once in the
file. An entry with `change` and `same` (the reason why the change has no effect) is not tried. Changes are made in a
copy of the tree, in which the tests must pass first. Prints survivors and a table; exit status 1 if any change
survives; see docs/research/reliability.md.
"""

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
SLOWEST = 300.0  # seconds; a timeout counts as a failure, e.g. for endless loops
PASSED, FAILED, BROKEN = 0, 1, 2  # exit codes of pytest; broken: not collected

# Processes with the slow imports, but none of ours.
SERVED = multiprocessing.get_context("forkserver")
SERVED.set_forkserver_preload(
    ["torch", "diffusers.schedulers", "transformers", "peft", "accelerate", "pydantic", "pytest"]
)


@dataclass(frozen=True)
class Mutant:
    """A wrong change of a file: the only occurrence of `before` becomes `after`."""

    file: str  # path in the tree
    before: str
    after: str
    tests: tuple[str, ...]  # files of the nearest tests
    same: str | None = None  # reason why the change has no effect; None if it has an effect

    def __str__(self) -> str:
        return f"{self.file}: {self.before}{ARROW}{self.after}"

    def apply(self, text: str) -> str:
        """Return the changed text. Raises ValueError unless `before` occurs exactly once."""
        if text.count(self.before) != 1:
            raise ValueError(f"{self.file}: {self.before!r} is there {text.count(self.before)} times, not once")
        return text.replace(self.before, self.after)


def read(table: Path, root: Path, only: str = "") -> list[Mutant]:
    """Return the changes whose line contains `only`. Raises ValueError if any entry does not fit its file or tests."""
    found, written = [], table.read_text()
    for file, entry in yaml.safe_load(written).items():
        if f"\n{written}".count(f"\n{file}:\n") > 1:  # YAML would read the last one alone
            raise ValueError(f"{file}: it has two entries, make them one")
        text = (root / file).read_text()
        for test in entry["tests"]:
            if not (root / test).exists():
                raise ValueError(f"{file}: its test {test} is missing")
        for change in entry["changes"]:
            line, same = (change, None) if isinstance(change, str) else (change["change"], change["same"])
            before, _, after = line.partition(ARROW)
            mutant = Mutant(file, before, after, tuple(entry["tests"]), same)
            mutant.apply(text)
            found.append(mutant)
    return [mutant for mutant in found if only in str(mutant)]


def copy_tree(root: Path, folder: str | Path) -> Path:
    """Copy the files that the tests need from a tree into an empty folder, and return that folder."""
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (root / name).exists():
            shutil.copy(root / name, folder)
    return Path(folder)


def tests_pass(tree: Path, tests: Sequence[str]) -> bool:
    """Return whether tests pass in a tree. Raises RuntimeError if they could not be run."""
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
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path.insert(0, str(tree))
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    sys.exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])))


def survives(mutant: Mutant, tree: Path) -> bool:
    """Apply a change, return whether the nearest tests pass, and undo the change."""
    file = tree / mutant.file
    text = file.read_text()
    stale = Path(cache_from_source(file))  # Python takes it for valid if length and second of the source are equal
    try:
        file.write_text(mutant.apply(text))
        stale.unlink(missing_ok=True)
        return tests_pass(tree, mutant.tests)
    finally:
        file.write_text(text)
        stale.unlink(missing_ok=True)


def try_all(mutants: Sequence[Mutant], root: Path) -> list[Mutant]:
    """Return the surviving changes, tried in one copy of the tree. Raises RuntimeError if tests fail without a change."""
    survivors = []
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        tree = copy_tree(root, folder)
        for tests in dict.fromkeys(mutant.tests for mutant in mutants):
            if not tests_pass(tree, tests):
                raise RuntimeError(f"{' '.join(tests)}: they fail without any change")
        for mutant in mutants:
            if survives(mutant, tree):
                survivors.append(mutant)
                print(f"survives {mutant}", flush=True)
    return survivors


def main(arguments: list[str] | None = None, *, root: Path = ROOT, table: Path = TABLE) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a text that the file or the change contains")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree that are worked on at a time")
    options = parser.parse_args(arguments)
    begun, chosen = time.monotonic(), read(table, root, options.only)
    mutants = [mutant for mutant in chosen if mutant.same is None]
    with ThreadPoolExecutor(options.jobs) as pool:
        parts = [mutants[i :: options.jobs] for i in range(options.jobs)]
        survivors = [mutant for part in pool.map(lambda share: try_all(share, root), parts) for mutant in part]
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
