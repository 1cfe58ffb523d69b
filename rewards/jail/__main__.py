"""Lock this process up as far as the kernel allows, report each layer, and run a trial.

Input: a line of JSON with `place` (an empty folder), the limits `bytes`, `seconds`, `disk` and `files`, `without` (layers to
leave out) and `needed` (layers without which nothing runs); then the trial's questions. Output: a line of JSON with each
layer's error (null: in place), then the replies. Both use copies of the standard descriptors, since the program under trial
gets /dev/null in their place. This folder uses the standard library only.
"""

import json
import os
import resource
import signal
import stat
import sys

import kernel
import landlock
import namespaces
import seccomp
import trial

LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/nix/store")
FIRST_USER, USERS = 61184, 4000  # range of systemd's dynamic users
PROCESSES = 1  # threads count
OPEN_FILES = 64
TIMED_OUT = 124  # exit status


def main():
    """Run everything and end the process."""
    questions = open(os.dup(0), "rb")  # noqa: SIM115, stays open
    out, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    job = json.loads(questions.readline())
    layers = dict.fromkeys(job["without"], "left out")
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))
    candidates = [*sys.path, os.path.dirname(os.path.dirname(os.__file__)), *LIBRARIES]
    readable = [folder for folder in dict.fromkeys(candidates) if os.path.isdir(folder)]
    user = FIRST_USER + os.getpid() % USERS
    os.umask(0o022)

    _attempt(layers, "namespaces", namespaces.enter)
    if layers["namespaces"] is None:
        _attempt(layers, "root folder", namespaces.change_root, job["place"], readable, job["disk"], job["files"])
        _continue_as_first_process(job["seconds"])
    own_root = layers.get("root folder", "") is None
    folder = "/tmp" if own_root else job["place"]
    reachable = own_root or all(map(_open_to_all, [*readable, os.path.dirname(folder)]))
    _attempt(layers, "user", _become_nobody, user, folder, reachable)
    _attempt(layers, "death with parent", kernel.die_with_parent, signal.SIGKILL)
    os.chdir(folder)
    _attempt(layers, "limits", _limit, job)
    _attempt(layers, "privileges", kernel.give_up_privileges)
    _attempt(layers, "landlock", landlock.restrict, readable, [folder])
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    _attempt(layers, "seccomp", seccomp.restrict)

    _write(out, json.dumps({"layers": layers}))
    if any(layers.get(layer, "not tried") is not None for layer in job["needed"]):
        os._exit(0)
    trial.run(questions, lambda reply: _write(out, reply))
    os._exit(0)


def _attempt(layers, name, action, *arguments):
    if name in layers:
        return
    try:
        action(*arguments)
        layers[name] = None
    except (OSError, ValueError, AttributeError) as error:  # AttributeError: a C library without the function
        layers[name] = getattr(error, "strerror", None) or str(error)


def _continue_as_first_process(seconds):
    """Fork and continue in the child, process 1 of the new pid namespace; the parent kills it after `seconds`."""
    child = os.fork()
    if child:
        too_long = []
        signal.signal(signal.SIGALRM, lambda *_: (too_long.append(True), os.kill(child, signal.SIGKILL)))
        signal.setitimer(signal.ITIMER_REAL, seconds)
        _, status = os.waitpid(child, 0)
        os._exit(TIMED_OUT if too_long else os.waitstatus_to_exitcode(status) & 0xFF)


def _become_nobody(user, folder, reachable):
    """Change from root to an unused user id, so that limits per user hold. A user other than root stays the same."""
    if os.geteuid() != 0:
        return
    if not reachable:
        raise PermissionError("Python or the folder lies where only root can go")
    os.chown(folder, user, user)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _open_to_all(folder):
    if not os.stat(folder).st_mode & stat.S_IROTH:
        return False
    while folder != "/":
        if not os.stat(folder).st_mode & stat.S_IXOTH:
            return False
        folder = os.path.dirname(folder)
    return True


def _limit(job):
    limits = {
        resource.RLIMIT_AS: job["bytes"],
        resource.RLIMIT_CPU: int(job["seconds"]) + 1,
        resource.RLIMIT_FSIZE: job["disk"],
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_NPROC: PROCESSES,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


def _write(out, line):
    unwritten = memoryview(line.encode() + b"\n")
    while unwritten:
        unwritten = unwritten[os.write(out, unwritten) :]


main()
