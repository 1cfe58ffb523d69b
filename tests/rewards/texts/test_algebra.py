r"""The reward math_verify, beside ours; what needs the package runs where it is installed."""

import os
import time
from importlib.util import find_spec

import pytest

import rewards
from rewards import RewardError
from rewards.texts.text import math_accuracy

installed = pytest.mark.skipif(find_spec("math_verify") is None, reason="math-verify is not installed")


@pytest.fixture(scope="module")
def judge():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "secret")
        yield rewards.load("math_verify", options={"seconds": 5}).function


@pytest.fixture(scope="module")
def hasty():
    return rewards.load("math_verify", options={"seconds": 1}).function


@installed
@pytest.mark.parametrize(("given", "right", "ours", "theirs"), [
    ("3", "3", 1, 1), ("4", "3", 0, 0), (r"\frac{1}{2}", "0.5", 1, 1), ("1,000", "1000", 1, 1),
    ("(1,2)", "(1, 2)", 1, 1), ("(2,1)", "(1,2)", 0, 0), ("[1,2]", "(1,2)", 0, 0), ("x=3", "3", 1, 1),
    (r"\text{east}", "east", 1, 1), (r"5\text{ cm}", "5", 1, 1), (r"90^\circ", "90", 1, 1), (r"25\%", "25", 1, 1),
    ("0.333", r"\frac{1}{3}", 0, 0), ("", "3", 0, 0), ("2x+2", "2(x+1)", 0, 1), ("y^2+x", "x+y^2", 0, 1),
    (r"\sqrt{8}", r"2\sqrt{2}", 0, 1), ("2^{10}", "1024", 0, 1), (r"\{1,2\}", r"\{2,1\}", 0, 1),
    (r"\pi/4", r"\frac{\pi}{4}", 0, 1), (r"3 \pm \sqrt{2}", r"3+\sqrt{2}, 3-\sqrt{2}", 0, 1),
    (r"x \in [1,2]", "[1,2]", 0, 1), (r"25\%", "0.25", 0, 1), ("1 270", "1270", 1, 0),
])  # fmt: skip
def test_where_the_two_judges_agree_and_where_not(judge, given, right, ours, theirs):
    text = rf"<answer>so it is \boxed{{{given}}}</answer>"
    assert math_accuracy([text], [""], [right]) == [ours]
    assert judge([text], [""], [right]) == [theirs]


@installed
def test_answers_are_read_as_ours_are(judge):
    texts = ["#### 1024", "<answer>2^{10}</answer>", "2^{10}", r"\boxed{1} and \boxed{2^{10}}", "so it is 1024"]
    assert judge(texts, [""] * 5, [r"Hence $\boxed{1024}$."] * 5) == [1, 1, 0, 1, 0]
    assert judge(texts[:1] * 2, [""] * 2, [None, r"\text{}"]) == [None, None]


@installed
def test_an_answer_that_never_ends_is_wrong_and_the_next_is_judged(hasty):
    assert hasty([r"\boxed{3}"], [""], ["3"]) == [1]
    for endless in (r"9^{9^{9^{9}}}", "(" * 100_000):
        assert hasty([rf"\boxed{{{endless}}}"], [""], ["3"]) == [0]
        assert hasty([r"\boxed{3}"], [""], ["3"]) == [1]


@installed
def test_equal_pairs_are_asked_once_and_the_process_ends_with_the_reward(hasty):
    before = hasty._same.cache_info().misses
    assert hasty([r"\boxed{7}"] * 3, [""] * 3, ["7"] * 3) == [1, 1, 1]
    assert hasty._same.cache_info().misses == before + 1
    process = hasty._process.pid
    hasty.__del__()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@installed
def test_it_sees_no_secret_of_the_environment(judge):
    judge([r"\boxed{33}"], [""], ["3"])  # which starts a process, where an answer ended the last
    with open(f"/proc/{judge._process.pid}/environ") as file:
        assert "secret" not in file.read()


def test_without_the_package_it_is_one_sentence_before_anything_is_started(monkeypatch):
    monkeypatch.setattr("rewards.texts.algebra.find_spec", lambda name: None)
    said = r"math-verify is not installed, pip install 'flowgrpo\[math\]'; or use math_acc"
    with pytest.raises(RewardError, match=said):
        rewards.load("math_verify")


@pytest.mark.parametrize("options", [{"seconds": 0}, {"seconds": "x"}, {"megabytes": float("nan")}, {"seconds": True}])
def test_wrong_options_are_refused(monkeypatch, options):
    monkeypatch.setattr("rewards.texts.algebra.find_spec", lambda name: True)
    with pytest.raises(RewardError, match=f"math_verify: {next(iter(options))} is .*, but must be a number above 0"):
        rewards.load("math_verify", options=options)


def test_a_package_that_does_not_start_is_one_sentence(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no antlr4')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    started = time.monotonic()
    with pytest.raises(RewardError, match=r"math-verify cannot be started here \(ImportError: no antlr4\)$"):
        rewards.load("math_verify").function([r"\boxed{3}"], [""], ["3"])
    assert time.monotonic() - started < 60
