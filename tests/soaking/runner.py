"""Cases one after the other, for a number of them or for a time, and the table of what came of them."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from soaking.cases import ENDINGS, Case, soak, undisturbed
from soaking.subjects import SUBJECTS, Subject, furnish

COLUMNS = ("kills", "damages", "exact recoveries", "refusals", "failures")


def cases(
    seed: int,
    place: Path,
    *,
    numbers: Iterator[int],
    minutes: float = math.inf,
    subjects: Sequence[Subject] = SUBJECTS,
    kills: int = 4,
) -> Iterator[Case]:
    """Run the cases of some numbers in an empty folder until the time is over; subjects take turns by number."""
    furnish(place)
    end, whole = time.monotonic() + 60 * minutes, {}
    for number in numbers:
        if time.monotonic() > end:
            return
        subject = subjects[number % len(subjects)]
        if subject not in whole:
            left, seconds = undisturbed(subject, place, f"whole-{len(whole)}")
            whole[subject] = {"whole": left, "seconds": seconds}
        yield soak(seed, number, subject, place, kills=kills, **whole[subject])


def counted(case: Case) -> Counter[str]:
    kills = sum(case.counts[how] for how in ENDINGS)
    return Counter(case.counts) + Counter({"cases": 1, "kills": kills, "failures": int(case.failure is not None)})


def table(found: Sequence[Case]) -> str:
    """Return the counts of each subject and of all as a table of Markdown, and how runs were ended."""
    rows = {}
    for case in found:
        for name in (case.subject.name, "all"):
            rows[name] = rows.get(name, Counter()) + counted(case)
    total = rows.pop("all", Counter())
    lines = ["| run | cases | " + " | ".join(COLUMNS) + " |", "|---" * (2 + len(COLUMNS)) + "|"]
    lines += [
        f"| {name} | " + " | ".join(str(counts[column]) for column in ("cases", *COLUMNS)) + " |"
        for name, counts in (*rows.items(), ("all", total))
    ]
    ended = ", ".join(f"{how} {total[how]}" for how in ENDINGS)
    return "\n".join([*lines, "", f"Ended by: {ended}."])


def steps(case: Case, seed: int) -> str:
    """Say what was done in a case that failed, and how to repeat it."""
    words = "\n".join(f"  {number}. {step}" for number, step in enumerate(case.steps, start=1))
    again = f"python scripts/soak.py --seed {seed} --only {case.number}"
    return f"case {case.number} of seed {seed}, {case.subject.name}: {case.failure}\n{words}\nagain: {again}"


def run(seed: int, place: Path, tell: Callable[[str], object], **options: object) -> list[Case]:
    """Run cases and report each as it ends; see `cases`."""
    found = []
    for case in cases(seed, place, **options):
        found.append(case)
        counts = counted(case)
        tell(f"case {case.number}: {case.subject.name}: {counts['kills']} kills, {counts['damages']} damages")
        if case.failure is not None:
            tell(steps(case, seed))
    return found
