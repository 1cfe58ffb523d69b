"""The worked example of docs/guides/add_a_method.md as a reader follows it, and what is said of trees that cannot work."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from field import lines, resumed, settings, trainer, weights_of

from flowgrpo.cli import main
from samplers.kernels import Kernel

pytestmark = pytest.mark.usefixtures("kept_trials")
ROOT = Path(__file__).parents[5]
PAGE = (ROOT / "docs/guides/add_a_method.md").read_text().partition("## If the tree is new")[2]
BLOCKS = dict(re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
PICTURE = re.findall(r"^    (.*)$", re.sub(r"^```.*?^```$", "", PAGE, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)

ODD = """
from samplers.trees import Move

def of_ode(kernels):
    return lambda role, step: (Move(trained=True),)

def bare(kernels):
    return lambda role, step: Move(kernels[step])


def forgetful(kernels):
    pass


def of_nothing(kernels):
    return lambda role, step: (Move(kernels[step]),)

def to_nowhere(kernels):
    return lambda role, step: (Move(kernels[step], trained=True),) if step < 5 else ()

def of_old_words(kernels):
    return lambda role, step: (Move(stops=(len(kernels),)),)

def of_unknown_words(kernels):
    move = Move(kernels[0], heat=2.0)
    return lambda role, step: (move,)

def broken(kernels):
    return lambda role, step: (Move(kernels[step], trained=int(None)),)

def splitting(kernels, at):
    return lambda role, step: (Move(kernels[step], count=2 if step == at else 1, trained=step <= at),)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the page's file, its row in the config of the embedded model, and functions that are wrong."""
    (tmp_path / BLOCKS["python"].splitlines()[0].removeprefix("# ")).write_text(BLOCKS["python"])
    shapes = (ROOT / "configs" / "shapes.yaml").read_text()
    (tmp_path / "run.yaml").write_text(re.sub(r"^algorithm:.*$", BLOCKS["yaml"], shapes, flags=re.MULTILINE))
    (tmp_path / "odd.py").write_text(ODD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(capsys, tree, *options):
    """Status, answer and complaint of `flowgrpo plan` with some options of the tree replaced."""
    overrides = [f"algorithm.tree.{key}={json.dumps(value)}" for key, value in tree.items()]
    numbers = ["train.groups=2", "train.group_size=16"]
    status = main(["plan", "run.yaml", *numbers, *overrides, *options, "--format", "json"])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_page_s_method_is_drawn_as_on_the_page(place, capsys):
    assert len(PICTURE) == 2
    status, out, _ = planned(capsys, {})
    told = json.loads(out)
    assert (status, told["picture"]) == (0, PICTURE)
    assert told["axes"] == {
        "tree": "custom", "kernel": "flow_sde", "hints": "none", "likelihood": "trajectory",
        "credit": "terminal", "baseline": "group_mean", "objective": "clip",
    }  # fmt: skip
    # 2 groups of 16 chains of 10 steps, of which 0, 2, 4, 6 and 8 are trained
    assert told["model_evaluations"] == {"rollout": 2 * 16 * 10, "update": 2 * 16 * 5}
    assert told["geometry"]["trained_edges"] == 2 * 16 * 5
    _, out, _ = planned(capsys, {"options": {"every": 3}})
    assert json.loads(out)["picture"][1] == "o~~~o---o---o~~~o---o---o~~~o---o---o---*"


def in_the_plane(folder, iterations):
    numbers = {"train__iterations": iterations, "train__groups": 2, "train__micro_batch": 5}
    chosen = settings(folder, algorithm=yaml.safe_load(BLOCKS["yaml"])["algorithm"], **numbers)
    return trainer(chosen, held_out=0)


def test_the_page_s_method_trains_and_resumes(place):
    whole = in_the_plane(place / "a", 2)
    before = weights_of(whole)
    whole.run()
    told = lines(whole)
    assert [line["policy/max_abs_log_ratio"] for line in told] == [0.0, 0.0]
    assert all(line["policy/grad_norm"] > 0 for line in told)
    assert [line["cost/trained_edges"] for line in told] == [2 * 8 * 3] * 2  # steps 0, 2, 4 of 6
    sigmas, tree = whole.policy.sigmas, whole.rollout(2, whole.groups(2)).tree
    assert tree.trained_steps == [(Kernel("flow_sde", 0.7), sigmas[k], sigmas[k + 1]) for k in (0, 2, 4)]
    in_the_plane(place / "b", 1).run()
    rest = resumed(in_the_plane(place / "b", 2))
    assert lines(rest) == told
    for name, tensor in weights_of(whole).items():
        assert torch.equal(weights_of(rest)[name], tensor)
        assert not torch.equal(before[name], tensor)


def odd(name, **options):
    return {"function": f"./odd.py:{name}", "options": options}


REFUSED = [
    (
        {"options": {"evry": 2}},
        ".options: got an unexpected keyword argument 'evry'; ./zigzag.py:zigzag has the options every",
    ),
    (odd("splitting"), ".options: missing a required argument: 'at'; ./odd.py:splitting has the options at"),
    (
        odd("of_ode", every=2),
        ".options: got an unexpected keyword argument 'every'; ./odd.py:of_ode has the options none",
    ),
    ({"function": "./zigzag.py:zigzg"}, ".function './zigzag.py:zigzg': nothing is named 'zigzg' there"),
    ({"function": "./zagzig.py:zigzag"}, ".function './zagzig.py:zigzag': there is no file zagzig.py"),
    ({"trajectories": 2}, ".trajectories: the plan of a root has 1 ends, not 2"),
    (
        {"trajectories": 3},
        "train.group_size: 16 does not divide by the 3 algorithm.tree.trajectories of each root, take 15 or 18",
    ),
    (odd("of_ode"), ": the plan trains a deterministic step, which has no log-probability"),
    (odd("forgetful"), ".function: ./odd.py:forgetful returned NoneType, not a plan (role, step) -> moves"),
    (
        odd("bare"),
        ".function: the plan of ./odd.py:bare returned Move at step 0, not a tuple of Moves such as (Move(),)",
    ),
    (odd("of_old_words"), ".function: ./odd.py:of_old_words: a Move has no 'stops', did you mean 'ode_stops'?"),
    (
        odd("of_unknown_words"),
        ".function: ./odd.py:of_unknown_words: a Move has no 'heat', choose one of kernel, role, count, trained, ode_stops, "
        "sibling_strength, noise_scale",
    ),
    (odd("of_nothing"), ": the plan trains no step, or leads to no sample"),
    (odd("to_nowhere"), ": the plan trains no step, or leads to no sample"),
    (
        odd("splitting", at=3),
        "algorithm.credit: terminal needs trajectories that share no edge, such as those of chain",
    ),
]


@pytest.mark.parametrize(("tree", "said"), REFUSED)
def test_a_tree_that_cannot_work_is_refused_in_a_sentence(place, capsys, tree, said):
    status, out, err = planned(capsys, tree)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"flowgrpo: {'algorithm.tree' if said[0] in '.:' else ''}{said}")


def test_other_errors_of_a_user_s_plan_keep_their_traceback(place, capsys):
    with pytest.raises(TypeError, match="int"):
        planned(capsys, odd("broken"))


def test_a_tree_says_how_many_ends_a_root_has(place, capsys):
    split = odd("splitting", at=3), "algorithm.credit=depthwise"
    status, _, err = planned(capsys, *split)
    assert (status, err) == (2, "flowgrpo: algorithm.tree.trajectories: the plan of a root has 2 ends, not 1\n")
    status, out, _ = planned(capsys, *split, "algorithm.tree.trajectories=2")
    told = json.loads(out)
    assert (status, told["geometry"]["roots"], told["decoded"]) == (0, 8, 2 * 16)
    assert told["picture"][1] == "o~~~o~~~o~~~o~2~o===o===o===o===o===o---*"
