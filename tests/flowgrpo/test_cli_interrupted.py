"""Ctrl-C ends a command in one line with status 130, from its first moment on."""

import os
import signal
from pathlib import Path

import pytest
from runs import background, interpreter, metrics

ROOT = Path(__file__).parents[2]

# Ctrl-C while a module is imported, whatever imports it.
AT_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}" and os.environ.get("RANK", "{alone}") == "1":
            os.kill({pid}, signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""

# Ctrl-C in some calls of the reward: the first two are on synthetic samples, the third is in the first evaluation, and the
# fourth in an iteration.
AT_CALL = """
import os, signal, time
calls = []
def redness(images, prompts):
    calls.append(1)
    if len(calls) in {calls} and os.environ.get("RANK", "{alone}") == "1":
        os.kill({pid}, signal.SIGINT)
        time.sleep(0.5 * ({pid} != os.getpid()))
    return images[:, 0].mean((1, 2))
"""


def interrupted(process):
    out, said = process.communicate(timeout=300)
    spoken = [line for line in out.splitlines() if "peer ranks" not in line]  # which the gloo of torch 2.9 prints
    assert (process.returncode, spoken) == (130, [])
    return said


def importing(folder, *options):
    """A run that meets the `sitecustomize` of this folder before its own first import."""
    return interpreter("train", "tiny.yaml", *options, PYTHONPATH=os.pathsep.join((str(folder), str(ROOT))))


@pytest.mark.parametrize(
    "module",
    ["pydantic", "torch._C", pytest.param("diffusers.models.transformers.transformer_sd3", marks=pytest.mark.zoo)],
)
def test_while_others_are_imported(workplace, module):
    (workplace / "sitecustomize.py").write_text(AT_IMPORT.format(module=module, pid="os.getpid()", alone=1))
    assert interrupted(importing(workplace)) == "flowgrpo: interrupted\n"
    assert not (workplace / "runs").exists()


@pytest.mark.parametrize("call", [1, pytest.param(3, marks=pytest.mark.zoo)])
def test_while_a_reward_is_tried_and_in_the_first_evaluation(workplace, call):
    (workplace / "mine.py").write_text(AT_CALL.format(calls=[call], pid="os.getpid()", alone=1))
    assert interrupted(background("train", "tiny.yaml")).splitlines()[-1] == "flowgrpo: interrupted"
    assert not list((workplace / "runs").glob("*/checkpoints"))


@pytest.mark.zoo
def test_in_two_processes(workplace):
    """Ctrl-C reaches the process that started them, which passes it on to both."""
    (workplace / "sitecustomize.py").write_text(AT_IMPORT.format(module="pydantic", pid="os.getppid()", alone=0))
    said = interrupted(importing(workplace, "run.processes=2", "train.groups=4"))
    assert said == "flowgrpo: interrupted\n"


def test_in_the_first_evaluation_of_two_processes(workplace):
    (workplace / "mine.py").write_text(AT_CALL.format(calls=[3], pid="os.getppid()", alone=0))
    options = ["run.processes=2", "train.groups=4", "eval.prompts=4", "train.micro_batch=1"]
    said = interrupted(background("train", "tiny.yaml", *options))
    assert said.splitlines()[-1] == "flowgrpo: interrupted"
    assert "Traceback" not in said
    assert "failed" not in said


def test_a_process_in_the_background_that_ignores_it_goes_on_ignoring_it(workplace):
    """As a shell's background jobs do."""
    (workplace / "mine.py").write_text(AT_CALL.format(calls=[1, 4], pid="os.getpid()", alone=1))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = background("train", "tiny.yaml", "train.iterations=1", "train.updates=1", "eval.every=9")
    finally:
        signal.signal(signal.SIGINT, before)
    process.communicate(timeout=300)
    assert process.returncode == 0
    assert [line["step"] for line in metrics(workplace / "runs" / "t")] == [1]
