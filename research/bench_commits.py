"""Measure the CPU seconds of an iteration and the peak memory of a run at two commits, in turns.

    OMP_NUM_THREADS=1 python research/bench_commits.py OLD NEW CONFIG [KEY=VALUE ...] [--rounds 3] [--iterations 4]

Each commit is checked out into a temporary folder and trains through the command line, in one process without
evaluations. A relative CONFIG is that of the commit; an absolute path is read as it is now. A round runs each commit
for one iteration and for 1 + `--iterations`. The difference of the CPU seconds, divided by `--iterations`, is the cost
of an iteration without the start. Prints a table in Markdown: CPU seconds of an iteration and GiB of the longer run's peak
resident memory at each commit, and their ratios, new over old.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import paired
from paired import Spent

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


def trained(place: Path, config: str, overrides: Sequence[str], iterations: int) -> Spent:
    """Return what a run takes with the code in a folder."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "flowgrpo", "train", config, *ALONE, *overrides]
        command += [f"train.iterations={iterations}", f"run.dir={folder}", "run.name=run"]
        return paired.spent(command, cwd=place, env=os.environ | {"PYTHONPATH": str(place)})


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
    peaks: dict[str, list[float]] = {"old": [], "new": []}
    commits = {"old": options.old, "new": options.new}
    overrides = {"old": options.overrides, "new": [*options.overrides, *options.only_new]}
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        places = {
            name: stack.enter_context(checked_out(commit, Path(folder) / name)) for name, commit in commits.items()
        }
        for turn in range(options.rounds):
            for name in list(taken)[:: -1 if turn % 2 else 1]:
                short, long = (
                    trained(places[name], options.config, overrides[name], count)
                    for count in (1, 1 + options.iterations)
                )
                taken[name].append((long.cpu - short.cpu) / options.iterations)
                peaks[name].append(long.peak)
    for name, commit in commits.items():
        seconds, peak = (paired.spread(each[name])["median"] for each in (taken, peaks))
        print(f"{name} ({commit}): {seconds:.2f} CPU seconds an iteration, {peak / 2**30:.2f} GiB")
    label = options.name or " ".join((options.config, *options.overrides))
    ratios = {
        f"iteration, {label}: new / old": paired.paired(taken["new"], taken["old"]),
        f"peak memory, {label}: new / old": paired.paired(peaks["new"], peaks["old"]),
    }
    paired.tell(ratios, options)


if __name__ == "__main__":
    main()
