import itertools
import os
import socket
import tempfile
import threading
import time
from functools import partial
from operator import gt
from pathlib import Path

import psutil
import pytest

import rewards
from flowgrpo.cli import main
from rewards import RewardError
from rewards.sandbox import sandbox
from rewards.texts.code import code, code_format, program_of

ROOT_FOLDER = ("namespaces", "root folder")


@pytest.fixture(scope="session")
def layers(protected):
    """What each layer says on this machine."""
    return sandbox.run("", []).layers


@pytest.fixture(scope="session")
def reward(layers):
    return code(seconds=1)


@pytest.fixture(scope="session")
def as_it_comes(layers):
    return rewards.load("code")


@pytest.fixture(scope="session")
def whole(layers):
    """A machine with every layer, or the test is skipped."""
    if any(said is not None for said in layers.values()):
        pytest.skip(f"this machine has not every layer: {layers}")


@pytest.fixture
def secret(tmp_path):
    """A file that no program may read or change."""
    file = tmp_path / "secret"
    file.write_text("a secret")
    yield file
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("a secret", 0o644)


@pytest.fixture
def facts(secret):
    """What attacks aim at, and a port where somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield {"secret": str(secret), "port": listener.getsockname()[1], "pid": os.getpid()}


def scores(reward, *programs, tests=("assert answer == 42",)):
    return reward(list(programs), [""] * len(programs), [list(tests)] * len(programs), [True] * len(programs))


GOOD = "answer = 42"
FORGED = (
    "import os\nfor handle in range(3, 9):\n    try:\n        os.write(handle, b'passed\\n1\\nTrue\\n')\n"
    "    except OSError:\n        pass\nos._exit(0)"
)

ATTACKS = {
    "a fork bomb": "import os\nwhile True:\n    os.fork()",
    "a patient fork bomb": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "a thread bomb": "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(9,)).start()",
    "an endless loop": "while True:\n    pass",
    "an endless sleep that minds no signal": "import signal, time\n"
    "for s in range(1, 32):\n    if s not in (9, 19):\n        signal.signal(s, signal.SIG_IGN)\n"
    "while True:\n    time.sleep(9)",
    "10 GB at once": "x = bytearray(10 << 30)\nanswer = 42",
    "10 GB bit by bit": "x = []\nwhile len(x) < 10240:\n    x.append(bytearray(1 << 20))\nanswer = 42",
    "10 GB of shared memory": "import mmap\nx = mmap.mmap(-1, 10 << 30)\nanswer = 42",
    "a full disk": "for i in range(9999):\n    open(str(i), 'wb').write(bytes(8 << 20))\nanswer = 42",
    "one large file": "open('x', 'wb').write(bytes(64 << 20))\nanswer = 42",
    "a file outside": "open({secret!r}).read()\nanswer = 42",
    "a file outside by a way round": "open('/tmp/../../../..' + {secret!r}).read()\nanswer = 42",
    "a file outside by a link": "import os\nos.symlink({secret!r}, 'link')\nopen('link').read()\nanswer = 42",
    "the passwords": "open('/etc/passwd').read()\nanswer = 42",
    "this process": "open('/proc/{pid}/environ', 'rb').read()\nanswer = 42",
    "a file written outside": "open({secret!r}, 'a').write('x')\nanswer = 42",
    "a changed mode": "import os\nos.chmod({secret!r}, 0)\nanswer = 42",
    "a changed Python": "import os\nopen(os.__file__, 'a').write('x')\nanswer = 42",
    "a socket": "import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)\nanswer = 42",
    "a datagram": "import socket\n"
    "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))\nanswer = 42",
    "a local socket": "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0{local}')\nanswer = 42",
    "a program": "import subprocess\nsubprocess.run(['/bin/true'], check=True)\nanswer = 42",
    "a program in its place": "import os\nos.execv('/usr/bin/env', ['env'])",
    "a signal": "import os\nos.kill({victim}, 9)\nanswer = 42",
    "a signal to all": "import os\nos.kill(-1, 9)\nanswer = 42",
    "limits lifted": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nanswer = 42",
    "root again": "import os\nos.setuid(0)\nos.setgroups([])\nanswer = 42",
    "a mount": "import ctypes\nlibc = ctypes.CDLL(None)\n"
    "assert not libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)\nanswer = 42",
    "new namespaces": "import ctypes\nassert not ctypes.CDLL(None).unshare(0x10000000)\nanswer = 42",
    "an early end": "import os\nos._exit(0)",
    "an exit": "raise SystemExit",
    "a crash": "import ctypes\nctypes.string_at(0)",
    "much talk": "while True:\n    print('x' * 999)",
    "deep recursion": "def f():\n    f()\nf()\nanswer = 42",
}


# These take all of their time, as another does; they are stopped in other tests, too, or are much like what is.
LONG = ("a patient fork bomb", "an endless loop", "much talk")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.zoo] * (n in LONG)) for n in ATTACKS])
def test_an_attack_scores_nothing_and_the_next_program_its_due(reward, name, facts):
    local = f"flowgrpo-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{local}")
        abstract.listen()
        victim = psutil.Popen(["sleep", "60"])
        try:
            start = time.monotonic()
            attack = ATTACKS[name].format(victim=victim.pid, local=local, **facts)
            assert scores(reward, attack, GOOD) == [0.0, 1.0]
            assert time.monotonic() - start < 10
            assert victim.is_running()
            assert victim.status() != psutil.STATUS_ZOMBIE
        finally:
            victim.kill()
            victim.wait()


PROMISED = ("a fork bomb", "an endless loop", "10 GB at once", "a file outside", "a socket")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.zoo] * (n in LONG)) for n in PROMISED])
def test_the_reward_as_it_comes_refuses_what_is_promised_in_ten_seconds(as_it_comes, name, facts):
    text = f"Here you are:\n```python\n{ATTACKS[name].format(**facts)}\n```\n"
    assert as_it_comes.function.limits.seconds == 5
    start = time.monotonic()
    assert as_it_comes([text], [""], {"tests": [["assert answer == 42"]]}).tolist() == [0.0]
    assert time.monotonic() - start < 10


def test_a_batch_with_attacks_in_a_thread_of_a_training_process_leaves_nothing(layers, tmp_path, monkeypatch, facts):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    texts, expected = [], []
    for i in range(16):
        bad = i % 3 == 1  # each kind of attack once
        right = f"def double(x):\n    return {2 + i % 2} * x"
        program = ATTACKS[PROMISED[i // 3 % 5]].format(**facts) if bad else right
        texts.append(f"```python\n{program}\n```")
        expected.append(0.0 if bad else 0.5 if i % 2 else 1.0)
    tests = [["assert double(2) == 4", "assert double(0) == 0"]] * len(texts)
    reward, one, found = rewards.load("code", options={"seconds": 1}), psutil.Process(), []

    def held():
        return one.num_threads(), one.num_fds(), len(one.children(recursive=True))  # zombies are children too

    before = held()
    caller = threading.Thread(target=lambda: found.append(reward(texts, [""] * len(texts), {"tests": tests}).tolist()))
    caller.start()
    caller.join()
    assert found == [expected]
    deadline = time.monotonic() + 5
    while any(map(gt, held(), before)) and time.monotonic() < deadline:  # a joined thread ends a moment later
        time.sleep(0.02)
    assert not any(map(gt, held(), before))  # fewer, where something of an earlier test ended meanwhile
    assert list(folder.iterdir()) == []


def test_a_folder_that_a_program_made_unreadable_is_deleted_by_an_ordinary_user():
    with tempfile.TemporaryDirectory() as folder:
        place, outside = Path(folder) / "place", Path(folder) / "outside"
        os.chmod(folder, 0o777)
        child = os.fork()
        if child == 0:
            try:
                if os.geteuid() == 0:  # root reads and deletes whatever the mode is
                    os.setresuid(65534, 65534, 65534)
                outside.mkdir(0o500)
                (place / "a").mkdir(parents=True)
                (place / "a" / "b").write_text("x")
                (place / "link").symlink_to(outside)
                (place / "a").chmod(0)
                sandbox._remove(str(place))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert [path.name for path in Path(folder).iterdir()] == ["outside"]
        assert outside.stat().st_mode & 0o777 == 0o500


@pytest.mark.parametrize(("without", "lacking"), [
    (("seccomp",), set()), (ROOT_FOLDER, {"disk"}), (("landlock",), set()), (("user", "privileges"), set()),
    (("limits",), {"memory"}), ((*ROOT_FOLDER, "landlock"), {"files", "disk"}),
    ((*ROOT_FOLDER, "seccomp"), {"network", "disk"}),
    (("namespaces", "user", "limits", "privileges", "landlock", "seccomp"), set(sandbox.PROTECTIONS)),
])  # fmt: skip
@pytest.mark.usefixtures("whole")
def test_layers_overlap_and_a_missing_protection_is_found_by_trying(without, lacking):
    found = sandbox.find_missing(without=without)
    assert set(found) - {"processes"} == lacking - {"processes"}  # these depend on who runs the tests
    assert "processes" in found or "processes" not in lacking
    assert all(f"{name}: left out" in reason for name in without[:1] for reason in found.values())


@pytest.mark.usefixtures("whole")
def test_the_reward_is_refused_in_a_sentence_that_names_what_is_missing(monkeypatch):
    monkeypatch.setattr(sandbox, "find_missing", partial(sandbox.find_missing, without=(*ROOT_FOLDER, "landlock")))
    said = r"cannot shield files, disk .*landlock: left out.* set the option unsafe: \[files, disk\]"
    with pytest.raises(RewardError, match=said):
        rewards.load("code")
    reward = rewards.load("code", options={"unsafe": ["files", "disk"]})
    assert reward([GOOD], [""], {"tests": [["assert answer == 42"]], "bare": [True]}).tolist() == [1.0]


@pytest.mark.parametrize("protection", sandbox.PROTECTIONS)
def test_every_protection_that_is_missing_ends_a_command_with_one_sentence(monkeypatch, capsys, tmp_path, protection):
    monkeypatch.setattr(sandbox, "find_missing", lambda *_: {protection: "seccomp: Function not implemented"})
    monkeypatch.setattr(sandbox, "run", lambda *_, **options: sandbox.Outcome((True,), layers={"limits": None}))
    assert main(["serve", "code"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"cannot shield {protection} from the programs a model writes (seccomp: Function not implemented)" in said
    assert f"set the option unsafe: [{protection}]" in said
    for other in sandbox.PROTECTIONS:
        if other != protection:
            with pytest.raises(RewardError, match=f"cannot shield {protection}"):
                rewards.load("code", options={"unsafe": [other]})
    assert rewards.load("code", options={"unsafe": [protection]})
    with pytest.raises(RewardError, match="unsafe names 'colour'; choose of processes, memory, files, disk, network"):
        rewards.load("code", options={"unsafe": [protection, "colour"]})


def test_a_machine_that_cannot_run_the_sandbox_at_all_is_refused_too(monkeypatch):
    monkeypatch.setattr(sandbox.sys, "executable", "/bin/false")
    with pytest.raises(RewardError, match="^code: the sandbox cannot start Python here: status 1$"):
        rewards.load("code", options={"unsafe": list(sandbox.PROTECTIONS)})


@pytest.mark.usefixtures("whole")
def test_nothing_is_run_while_a_layer_is_lost_and_the_program_is_tried_again(monkeypatch):
    monkeypatch.setattr("rewards.texts.code._PAUSES", (0.0, 0.0))
    reward, whole, calls = code(), sandbox.run, []

    def short(*arguments, **options):
        """The sandbox of a machine that has no more namespaces, at first."""
        calls.append(1)
        return whole(*arguments, **options, without=("namespaces",) if len(calls) <= lost else ())

    monkeypatch.setattr(sandbox, "run", short)
    lost = 2
    assert scores(reward, GOOD) == [1.0]
    assert len(calls) == 3
    lost = 6
    with pytest.raises(RewardError, match=r"^code: the sandbox lost namespaces \(left out\), and runs nothing$"):
        scores(reward, GOOD)


def test_a_lost_layer_ends_the_jail_before_the_program(layers, monkeypatch):
    assert sandbox.run("x = 1", ["assert x == 1"], without=["seccomp"], needed=["limits"]).passed == (True,)
    with pytest.raises(sandbox.SandboxError, match="lost seccomp"):
        sandbox.run("x = 1", ["assert x == 1"], without=["seccomp"], needed=["limits", "seccomp"])
    monkeypatch.setattr(sandbox._Process, "_check", lambda *_: None)
    outcome = sandbox.run("x = 1", ["assert x == 1"], without=["seccomp"], needed=["limits", "seccomp"])
    assert (outcome.passed, outcome.problem) == ((False,), "ended with status 0")


def test_the_reward_is_described(capsys):
    assert main(["rewards", "code"]) == 0
    said = capsys.readouterr().out
    for word in ("sandbox", "socket", "memory", "process", "file", "seconds", "unsafe", "tests"):
        assert word in said


def test_the_score_is_the_share_of_tests_passed(layers, as_it_comes):
    program = "def double(x):\n    return 2 * x if x < 3 else x\nprint('hello')"
    tests = ["assert double(1) == 2", "assert double(2) == 4", "assert double(3) == 6", "no python", "double()"]
    outcome = sandbox.run(program, tests)
    assert (outcome.passed, outcome.problem) == ((True, True, False, False, False), None)
    assert scores(as_it_comes.function, program, tests=tests) == [0.4]


def test_a_test_that_hangs_costs_the_ones_after_it_and_leaves_nothing_behind(layers, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    program, tests = "open('x', 'w').write('x')\nn = 1", ["assert n == 1", "while True: pass", "assert n == 1"]
    outcome = sandbox.run(program, tests, sandbox.Limits(seconds=1))
    assert (outcome.passed, outcome.problem) == ((True, False, False), "timed out")
    assert {process.pid for process in psutil.Process().children(recursive=True)} == before
    assert list(tmp_path.iterdir()) == []


DEFINED, ASKING, TRUE = "def f(x):\n    return x", "import sys\nsys.stdin.read()", ["assert f(1) == 1"]


@pytest.mark.usefixtures("layers")
@pytest.mark.parametrize(("program", "tests", "passed", "problem"), [
    ("import no_such_name", ["pass"], (False,), "ModuleNotFoundError: No module named 'no_such_name'"),
    (f"n = int([][0])\n{DEFINED}", TRUE, (False,), "IndexError: list index out of range"),
    (f"{DEFINED}\nn = int([][0])", TRUE, (False,), "IndexError: list index out of range"),
    (f"{ASKING}\nn = int([][0])\n{DEFINED}", TRUE, (True,), None),  # who asked for input may fail at the top
    (FORGED, ["assert False", "assert True"], (False, False), "cheated: it wrote what was not asked for"),
    ("def double(x):\n    return 2 * x", [f"assert double({n}) == {2 * n}" for n in range(2000)], (True,) * 2000, None),
], ids=["no module", "above", "below", "asked for input", "forged", "thousands"])  # fmt: skip
def test_a_program_has_its_outcome(program, tests, passed, problem):
    outcome = sandbox.run(program, tests, sandbox.Limits(seconds=30))
    assert (outcome.passed, outcome.problem) == (passed, problem)


def test_ordinary_programs_have_what_they_need(layers):
    program = (
        "import bisect, collections, datetime, decimal, fractions, functools, hashlib, heapq, itertools, json, math\n"
        "import os, random, re, statistics, string, sys, tempfile, time, typing\n"
        "from dataclasses import dataclass\n"
        "@dataclass\nclass P:\n    x: int = 1\n"
    )
    tests = [
        "assert hashlib.sha256(b'x').hexdigest()[:2] == '2d'",
        "assert decimal.Decimal(1) / 3 and math.comb(5, 2) == 10 and random.Random(0).random() < 1",
        "open('a.txt', 'w').write('hi')\nassert open('a.txt').read() == 'hi' and os.listdir() == ['a.txt']",
        "with tempfile.TemporaryDirectory() as d:\n    assert os.path.isdir(d)",
        "time.sleep(0.01)\nassert datetime.date(2024, 2, 29).isoweekday() == 4",
        "assert P().x == 1 and sys.version_info >= (3, 11)",
        "assert sorted({'a', 'b', 'c'}) == ['a', 'b', 'c'] and len(bytearray(100 << 20)) > 0",
        "import multiprocessing, asyncio, unittest, sqlite3, zlib",
    ]
    outcome = sandbox.run(program, tests)
    assert (outcome.passed, outcome.problem) == ((True,) * len(tests), None)


def test_the_environment_is_empty_and_sets_have_one_order(layers, monkeypatch):
    monkeypatch.setenv("TOKEN", "secret")
    program = "import os\nfound = [value for value in os.environ.values() if 'secret' in value]"
    assert sandbox.run(program, ["assert found == []"]).passed == (True,)
    tests = [f"assert order == {list(order)}" for order in itertools.permutations("abcd")]
    seen = [sandbox.run("order = list({'a', 'b', 'c', 'd'})", tests).passed for _ in range(3)]
    assert seen[0] == seen[1] == seen[2]
    assert sum(seen[0]) == 1


def test_an_answer_cannot_take_back_what_was_said_nor_drown_it(layers):
    everywhere = "import os\nfor handle in range(9):\n    try:\n        {}\n    except OSError:\n        pass\n"
    rewind = everywhere.format("os.lseek(handle, 0, 0)\n        os.ftruncate(handle, 0)")
    assert sandbox.run(rewind, ["assert True"]).layers == layers
    flood = everywhere.format("while True:\n            os.write(handle, b'! x' * 9999)")
    outcome = sandbox.run(flood, ["assert True"], sandbox.Limits(seconds=1))
    assert (outcome.passed, outcome.problem, outcome.layers) == ((False,), "timed out", layers)


def test_a_folder_holds_no_more_files_than_it_should_and_says_where_it_does(layers):
    program = (
        "made = 0\ntry:\n    while made < 5000:\n        open(str(made), 'w').close()\n        made += 1\n"
        "except OSError:\n    pass"
    )
    tests = [f"assert made < {bound}" for bound in (sandbox.Limits().files + 1, sandbox.Limits().files - 200)]
    assert sandbox.run(program, tests).passed == (True, False)
    assert "disk" in sandbox.find_missing(without=ROOT_FOLDER)


def test_programs_stand_in_the_last_block_and_their_format_is_scored():
    text = "So:\n```python\nx = 1\n```\nor better\n```py\nx = 2\n```\nend"
    assert program_of(text) == "x = 2\n"
    assert program_of("x = 3") is None
    assert program_of("x = 3", True) == "x = 3"
    texts = [text, "```python\nx = \n```", "x = 3", "```python\nx = 1"]
    assert code_format(texts, [""] * 4) == [1.0, 0.5, 0.0, 0.0]
    assert code_format(["x = 3", " "], [""] * 2, [True, None]) == [1.0, 0.0]


def test_rows_without_tests_do_not_concern_the_reward_and_wrong_tests_are_explained(as_it_comes):
    reward = as_it_comes.function
    assert reward(["x = 1", "x ="], ["", ""], [None, ["assert x"]], [True, True]) == [None, 0.0]
    with pytest.raises(ValueError, match="a list of tests for each prompt, not 'assert x'"):
        reward(["x = 1"], [""], ["assert x"], [True])
