"""A case: one run that is killed and damaged several times, resumed each time, and compared with one that was not."""

import random
import shutil
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import forked
import psutil

from soaking import state
from soaking.subjects import Subject

FIRST = {"folder": ".lock", "config": "config.yaml"}
LONGEST = 180  # seconds of a command, on a machine that others keep busy
LINGER = 40  # seconds in which all processes must have ended once one was killed: the launcher gives the others 20
ENDINGS = ("kill all", "kill one", "kill launcher", "SIGTERM", "SIGINT")
MOMENTS = ("time", "time", "folder", "config", "checkpoint", "metrics")


@dataclass
class Case:
    """What happened in one case.

    Attributes:
        requeued: whether each command has `run.resume=auto`, as a queue would give it again.
        steps: what was done, in order, with what came of it.
        counts: of kills by their kind, damages, exact recoveries and refusals.
        harmed: contents of damaged checkpoints by name; a run may have replaced or deleted one since.
    """

    number: int
    subject: Subject
    requeued: bool = False
    steps: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    harmed: dict[str, dict[str, bytes]] = field(default_factory=dict)
    failure: str | None = None


class Failed(Exception):
    """A case has gone wrong; the words say how."""


def undisturbed(subject: Subject, place: Path, name: str) -> tuple[dict, float]:
    """Return what an undisturbed run leaves, and its seconds; raise `Failed` if it does not end well."""
    started = time.monotonic()
    command = forked.Command(["train", *subject.arguments, f"run.name={name}"], {}, place)
    _, said = command.communicate(LONGEST)
    if command.returncode:
        raise Failed(f"the undisturbed run ended with {command.returncode}: {said[-500:]}")
    return state.left(place / "runs" / name), time.monotonic() - started


def soak(seed: int, number: int, subject: Subject, place: Path, *, whole: dict, seconds: float, kills: int = 4) -> Case:
    """Run one case, whose random choices come from a seed and its number.

    The run stays in `place` if the case fails. It must leave what the undisturbed run left, `whole`.
    """
    drawn = random.Random(f"{seed} {number}")
    case = Case(number, subject, requeued=drawn.random() < 0.5)
    folder = place / "runs" / f"case-{number}"
    try:
        for _ in range(drawn.randint(1, kills)):
            _disturbed(case, drawn, folder, seconds)
            _damaged(case, drawn, folder)
        harmed, command = _passed_over(case, folder), _resume(case, folder)
        _expect(command, 0, "the last resume")
        _check_warning(command, harmed)
        differs = state.difference(whole, state.left(folder))
        if differs:
            raise Failed(f"the resumed run is another than the undisturbed one, {differs}")
        case.counts["exact recoveries"] += 1
        if case.requeued:
            _check_finished(case, folder)
    except Failed as failed:
        case.failure = str(failed)
    else:
        shutil.rmtree(folder)
    return case


def _disturbed(case: Case, drawn: random.Random, folder: Path, seconds: float) -> None:
    """Begin the run or go on with it, and end it at a random moment in a random way."""
    harmed, command = _passed_over(case, folder), _begun(case, folder)
    moment, how = drawn.choice(MOMENTS), drawn.choice(ENDINGS)
    _wait(moment, drawn, command, folder, seconds)
    alive = [process for process in _processes(command) if process.is_running()]
    if command.poll() is not None:
        _expect(command, 0, "a run that came to its end")
        _check_warning(command, harmed)
        case.steps.append("the run came to its end")
        return
    killed = time.monotonic()
    if how == "kill one" and len(alive) > 1:
        _kill(drawn.choice(alive[1:]))
    elif how.startswith("kill"):
        for process in alive[: 1 if how == "kill launcher" else None]:
            _kill(process)
    else:
        command.send_signal(signal.Signals[how])
    command.wait(LINGER if how.startswith("kill") else LONGEST)
    _, left = psutil.wait_procs(alive, LINGER)
    case.steps.append(f"{how} by {moment}: status {command.poll()} after {time.monotonic() - killed:.1f} s")
    for process in left:
        _kill(process)
    if left or command.poll() is None:
        raise Failed(f"{len(left)} of {len(alive)} processes went on after {how}")
    _check_status(command, how, len(alive))
    case.counts[how] += command.returncode != 0  # otherwise it came to its end before it heard


def _check_status(command: forked.Command, how: str, processes: int) -> None:
    """Refuse an end without a sentence, or a status that says that nothing happened."""
    said = _said(command)
    if "Traceback" in said:
        raise Failed(f"a traceback after {how}: {said[-3000:]}")
    status = command.returncode
    allowed = {
        # 0: what SIGKILL reaches cannot say that, so the run had come to its end.
        "kill all": (-9, 0),
        "kill launcher": (-9, 0),
        "kill one": (-9, 0) if processes == 1 else (0, 137),
        # Before the first step SIGTERM ends a process as it ends any other; of several the launcher tells 128 + 15.
        "SIGTERM": (0, 130, -15, 143),
        "SIGINT": (0, 130),
    }[how]
    if status not in allowed:
        raise Failed(f"status {status} after {how}: {said[-3000:]}")
    if how == "kill one" and status == 137 and "with: flowgrpo train" not in said:
        raise Failed(f"nobody said how to go on after {how}: {said[-3000:]}")


def _damaged(case: Case, drawn: random.Random, folder: Path) -> None:
    """Damage some checkpoints, or delete all; a resume without a whole one must be refused, and the run gets them back."""
    checkpoints = folder / "checkpoints"
    there = {path.name for path in checkpoints.glob("step-*")}
    if not there or drawn.random() < 0.2:
        return
    before = {name: found for name, found in case.harmed.items() if found == _content(checkpoints / name)}
    copy = folder.with_name(f"{folder.name}-copy")
    shutil.copytree(checkpoints, copy)
    if drawn.random() < 0.2:
        shutil.rmtree(checkpoints)
        case.steps.append("deleted all checkpoints")
        _check_refusal(case, folder, "no checkpoint is left in")
        copy.rename(checkpoints)
        return
    case.harmed = dict(before)
    for _ in range(drawn.choice((1, 1, 2, 3, 5))):
        if not all(any(path.iterdir()) for path in checkpoints.glob("step-*")):
            break
        name, words = state.damage(checkpoints, drawn)
        case.harmed[name] = _content(checkpoints / name)
        case.counts["damages"] += 1
        case.steps.append(words)
    if case.harmed.keys() >= there:
        _check_refusal(case, folder, "no checkpoint is whole")
        state.restore(copy, checkpoints)
        case.harmed = before
    shutil.rmtree(copy)


def _check_refusal(case: Case, folder: Path, why: str) -> None:
    _check_unchanged(case, folder, status=2, words=why, what="a resume without a whole checkpoint")
    case.counts["refusals"] += 1


def _check_finished(case: Case, folder: Path) -> None:
    """Refuse a finished run that does more than to say so."""
    _check_unchanged(case, folder, status=0, words="with all its 4 iterations", what="a finished run")


def _check_unchanged(case: Case, folder: Path, *, status: int, words: str, what: str) -> None:
    """Check that a command ends with a status and one sentence with some words, and leaves the folder as it is."""
    before = state.content(folder)
    command = _resume(case, folder)
    _expect(command, status, what)
    said = _said(command)
    if said.count("\n") != 1 or words not in said:
        raise Failed(f"{what} is not told in a sentence: {said[-3000:]}")
    if state.content(folder) != before:
        raise Failed(f"{what}: the command changed the folder")


def _content(checkpoint: Path) -> dict[str, bytes]:
    return state.content(checkpoint) if checkpoint.is_dir() else {}


def _passed_over(case: Case, folder: Path) -> str | None:
    """Return the newest checkpoint, if a resume has to warn of it."""
    newest = max((path.name for path in (folder / "checkpoints").glob("step-*")), default="")
    same = newest in case.harmed and case.harmed[newest] == _content(folder / "checkpoints" / newest)
    return newest if same else None


def _begun(case: Case, folder: Path) -> forked.Command:
    """Begin a run, or go on with one."""
    resume = ["run.resume=true"] if (folder / "config.yaml").is_file() else []
    if case.requeued:
        resume = ["run.resume=auto"]
    place = folder.parents[1]
    return forked.Command(["train", *case.subject.arguments, f"run.name={folder.name}", *resume], {}, place)


def _resume(case: Case, folder: Path) -> forked.Command:
    command = _begun(case, folder)
    command.wait(LONGEST)
    if command.poll() is None:
        for process in _processes(command):
            _kill(process)
        raise Failed("a resume does not end")
    case.steps.append(f"go on: status {command.returncode}")
    return command


def _expect(command: forked.Command, status: int, what: str) -> None:
    if command.returncode != status:
        raise Failed(f"{what} ended with {command.returncode}: {_said(command)[-3000:]}")


def _check_warning(command: forked.Command, harmed: str | None) -> None:
    said = " ".join(_said(command).split())
    if harmed is not None and not (harmed in said and "; the run goes on from step " in said):
        raise Failed(f"no warning of the damaged {harmed}: {said[-3000:]}")


def _said(command: forked.Command) -> str:
    return command.communicate()[1]


def _wait(moment: str, drawn: random.Random, command: forked.Command, folder: Path, seconds: float) -> None:
    """Wait for a random time, a file of a beginning run, a checkpoint being written, or a line of metrics."""
    started, last = time.monotonic(), drawn.uniform(0, 0.8 * seconds)
    nth = drawn.randint(1, 3)
    metrics = folder / "metrics.jsonl"
    begun = metrics.read_bytes().count(b"\n") if metrics.is_file() else 0
    first = folder / FIRST.get(moment, "")
    before = _written(first)
    while command.poll() is None:
        if moment == "time" and time.monotonic() - started > last:
            return
        if moment in FIRST and _written(first) != before:  # by this command, and not by one that was killed
            return
        if moment == "checkpoint" and any(folder.glob("checkpoints/.step-*")):
            return
        if moment == "metrics" and metrics.is_file() and metrics.read_bytes().count(b"\n") >= begun + nth:
            time.sleep(drawn.uniform(0, 0.5))
            return
        time.sleep(0.0005)


def _written(file: Path) -> int | None:
    """Return when a file was last written, or None."""
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _processes(command: forked.Command) -> list[psutil.Process]:
    try:
        first = psutil.Process(command.pid)
        return [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()
