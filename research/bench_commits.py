"""Measure the CPU seconds of an iteration at two commits, in turns.

    OMP_NUM_THREADS=1 python research/bench_commits.py OLD NEW CONFIG [KEY=VALUE ...] [--rounds 3] [--iterations 4]

Each commit is checked out into a temporary folder and trains through the command line, in one process without
evaluations. A relative CONFIG is that of the commit; an absolute path is read as it is now. A round runs each commit
for one iteration and for 1 + `--iterations`. The difference of the CPU seconds, divided by `--iterations`, is the cost
of an iteration without the start. Prints a table in Markdown: CPU seconds of an iteration at each commit, and their
ratio, new over old.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import paired

REPOSITORY = Path(__file__).parents[1]
ALONE = ("run.processes=1", "eval.every=100000", "eval.prompts=1", "eval.save=0", "run.checkpoint.every=100000")


@contextmanager
def checked_out(commit: str, place: Path):
    """Check out a commit into a folder, as long as the context is open."""
    git = ["git", "-C", str(REPOSITORY), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(place), commit], check=True)
    try:
        yield place
    finally:
        subprocess.run([*git, "remove", "--force", str(place)], check=True)


def cpu_seconds(place: Path, config: str, overrides: Sequence[str], iterations: int) -> float:
    """Return the CPU seconds of a run with the code in a folder."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "flowgrpo", "train", config, *ALONE, *overrides]
        command += [f"train.iterations={iterations}", f"run.dir={folder}", "run.name=run"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            command, cwd=place, env=os.environ | {"PYTHONPATH": str(place)}, capture_output=True, text=True, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{' '.join(command)} in {place} ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Run the command line."""
    parser = paired.parser(__doc__, rounds=3)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--iterations", type=int, default=4, help="after the first, 4 by default")
    parser.add_argument("--only-new", action="append", default=[], help="an override of the new commit alone")
    parser.add_argument("--name", help="of the ratio; by default the config and its overrides")
    options = parser.parse_args()
    taken: dict[str, list[float]] = {"old": [], "new": []}
    commits = {"old": options.old, "new": options.new}
    overrides = {"old": options.overrides, "new": [*options.overrides, *options.only_new]}
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        places = {
            name: stack.enter_context(checked_out(commit, Path(folder) / name)) for name, commit in commits.items()
        }
        for turn in range(options.rounds):
            for name in list(taken)[:: -1 if turn % 2 else 1]:
                short, long = (
                    cpu_seconds(places[name], options.config, overrides[name], count)
                    for count in (1, 1 + options.iterations)
                )
                taken[name].append((long - short) / options.iterations)
    for name, commit in commits.items():
        print(f"{name} ({commit}): {paired.spread(taken[name])['median']:.2f} CPU seconds an iteration")
    label = options.name or " ".join((options.config, *options.overrides))
    paired.tell({f"iteration, {label}: new / old": paired.paired(taken["new"], taken["old"])}, options)


if __name__ == "__main__":
    main()
