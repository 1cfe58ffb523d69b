"""A plug-in cannot change the process: what it changes is put back, and said once."""

import logging
import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from fuzzing.plugins import CHANGES, WHERE, is_compared, source

from flowgrpo.data.prompts import Row
from flowgrpo.flow.methods.trees.custom_tree import Custom
from flowgrpo.training.scoring.scorer import Scorer
from rewards import load, process_state
from samplers import kernels

PICTURES = torch.rand(2, 3, 4, 4)


def loaded(folder, text, name="f"):
    (folder / "mine.py").write_text(text)
    return load(f"{folder / 'mine.py'}:{name}")


@pytest.mark.parametrize(
    ("name", "where"), [(name, where) for name in CHANGES for where in WHERE if is_compared(name, where)]
)
def test_what_a_reward_changes_is_put_back_and_said_once(tmp_path, caplog, name, where):
    get = CHANGES[name][2]
    before = get()
    with caplog.at_level(logging.WARNING):
        reward = loaded(tmp_path, source({where: [name]}), "bright")
        reward.to("cpu")
        for _ in range(2):
            values = reward(PICTURES, ["a", "b"], {})
    assert get() == before
    assert values.tolist() == PICTURES.mean((1, 2, 3)).double().tolist()
    if name == process_state.FILTERS:  # libraries add some when they are imported
        assert not caplog.records
        return
    (said,) = [record.getMessage() for record in caplog.records]
    assert str(tmp_path / "mine.py") in said
    assert f"changed {name}; that is put back after each of its calls" in said


@pytest.mark.parametrize("change", ["random.seed(1)", "np.random.seed(1)", "torch.manual_seed(1)"])
def test_an_import_leaves_the_generators_as_they_were(tmp_path, change):
    def drawn():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = drawn()
    loaded(tmp_path, f"import random, torch\nimport numpy as np\n{change}\ndef f(images, prompts):\n    pass\n")
    assert drawn() == before


def test_a_reward_that_draws_goes_on_drawing(tmp_path):
    reward = loaded(tmp_path, "import random\ndef f(images, prompts):\n    return [random.random() for _ in prompts]\n")
    random.seed(3)
    first, second = (reward(PICTURES, ["a", "b"], {}).tolist() for _ in range(2))
    random.seed(3)
    assert first + second == [random.random() for _ in range(4)]


def test_a_reward_that_fails_is_cleaned_up_after(tmp_path):
    text = "import torch\ndef f(images, prompts):\n    torch.set_default_dtype(torch.float64)\n    raise KeyError\n"
    with pytest.raises(KeyError):
        loaded(tmp_path, text)(PICTURES, ["a", "b"], {})
    assert torch.get_default_dtype() == torch.float32


def test_two_that_run_at_once_leave_what_was_before_both(caplog):
    """The first to begin ends first; what the second has found was the first's change, and stays until it ends."""
    entered, leave = threading.Event(), threading.Event()

    def run():
        with process_state.preserve("it", Path("first.py")):
            torch.set_default_dtype(torch.float64)
            entered.set()
            leave.wait(5)

    thread = threading.Thread(target=run)
    thread.start()
    entered.wait(5)
    with process_state.preserve("it", Path("second.py")):
        assert torch.get_default_dtype() == torch.float64
        leave.set()
        thread.join()
        assert torch.get_default_dtype() == torch.float64
    assert torch.get_default_dtype() == torch.float32
    assert caplog.messages[-1].startswith("one of first.py, second.py changed torch's default dtype; that is put back")


@pytest.mark.parametrize("main_calls", [True, False])
def test_a_call_beside_a_model_leaves_its_attention_alone(caplog, main_calls):
    """It begins while the model has chosen one, and ends after that."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    before = torch.backends.cuda.flash_sdp_enabled()
    chosen, called, left = threading.Event(), threading.Event(), threading.Event()

    def model():
        with sdpa_kernel(SDPBackend.MATH):
            chosen.set()
            called.wait(5)
        left.set()

    def call():
        chosen.wait(5)
        with process_state.preserve("it", Path("mine.py"), calls=True):
            called.set()
            left.wait(5)

    here, there = (call, model) if main_calls else (model, call)
    thread = threading.Thread(target=there)
    thread.start()
    here()
    thread.join()
    assert torch.backends.cuda.flash_sdp_enabled() == before
    assert not caplog.records


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("change", "said"), [
    ("compute.leave_out_cudnn_attention()", False),
    ("compute.leave_out_cudnn_attention(), torch.backends.cuda.enable_cudnn_sdp(True)", True),
])  # fmt: skip
def test_what_this_package_leaves_out_stays_left_out(tmp_path, caplog, monkeypatch, change, said, where):
    monkeypatch.setattr(process_state, "LEFT_OUT", set())
    monkeypatch.setitem(CHANGES, "it", ("import torch; from rewards import compute", change, None))
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        reward = loaded(tmp_path, source({where: ["it"]}), "bright")
        reward.to("cpu")
        reward(PICTURES, ["a", "b"], {})
        compared = is_compared("the attention cudnn", where)
        assert torch.backends.cuda.cudnn_sdp_enabled() == (said and not compared)
        told = [" changed the attention cudnn; " in message for message in caplog.messages]
        assert told == [True] * (said and compared)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_a_run_keeps_its_directory_while_a_reward_has_another(tmp_path):
    reward = loaded(
        tmp_path,
        "import os, threading\nthere, back = threading.Event(), threading.Event()\ndef f(images, prompts):\n"
        "    os.chdir('/')\n    there.set()\n    back.wait(5)\n    return [float(os.getcwd() == '/')] * len(prompts)\n",
    )
    before, events = os.getcwd(), reward.function.__globals__
    with Scorer([reward]) as scorer:
        wait = scorer.submit(PICTURES, [Row("a", 0, {}), Row("b", 1, {})])
        assert events["there"].wait(5)
        assert os.getcwd() == before
        events["back"].set()
        assert wait().values.flatten().tolist() == [1, 1]
    assert os.getcwd() == before


def test_a_judge_and_a_tree_are_held_alike(tmp_path, caplog):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\ndef compare(first, second, prompt):\n    torch.set_default_dtype(torch.float64)\n    return 0.5\n"
        "def tree(kernels):\n    torch.set_default_dtype(torch.float64)\n    return lambda role, step: []\n"
    )
    reward = load("preference", options={"compare": f"{file}:compare"})
    assert reward(PICTURES, ["a", "a"], {}).tolist() == [0.5, 0.5]
    assert torch.get_default_dtype() == torch.float32
    plan = Custom(function=f"{file}:tree").plan([kernels.ODE] * 2, 2, 0, 0)
    assert plan("trunk", 0) == []
    assert torch.get_default_dtype() == torch.float32
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == ["the function that compares"]


def test_our_own_rewards_are_not_looked_at(monkeypatch):
    monkeypatch.setattr(process_state._shared, "enter", lambda: pytest.fail("it was looked at"))
    load("jpeg_size")(PICTURES, ["a", "b"], {})
