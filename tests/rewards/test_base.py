import sys

import pytest
import torch

import rewards
from rewards import RewardError
from rewards.base import nearest
from rewards.compute import batched

IMAGES = torch.rand(2, 3, 8, 8)
MINE = """
def redness(images, prompts):
    return images[:, 0].mean((1, 2))
def counted(images, prompts, **columns):
    return [float(n) if n is not None else None for n in columns["count"]]
class Scaled:
    group_wise = True
    def __init__(self, scale=1.0):
        self.scale = scale
    def __call__(self, images, prompts, **columns):
        return [self.scale * len(p) for p in prompts]
THREE = 3
def _weights():
    raise OSError("no weights")
class Picky:
    def __init__(self):
        _weights()
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("mine", None)


@pytest.mark.parametrize("use", ["./mine.py:redness", "mine:redness"])
def test_a_function_is_found_by_file_and_by_dotted_path(mine, use):
    reward = rewards.load(use, weight=0.3)
    assert (reward.name, reward.weight) == ("redness", 0.3)
    torch.testing.assert_close(reward(IMAGES, ["a", "b"], {}), IMAGES[:, 0].mean((1, 2)).double())


def test_columns_reach_a_reward_that_takes_them_and_none_means_not_applicable(mine):
    values = rewards.load("./mine.py:counted")(IMAGES, ["a", "b"], {"count": [2, None], "other": [1, 1]})
    assert values[0] == 2
    assert values[1].isnan()
    rewards.load("./mine.py:redness")(IMAGES, ["a", "b"], {"count": [2, None]})  # takes none, and gets none


def test_a_column_that_a_reward_needs_and_prompts_lack_is_named(mine):
    (mine / "seen.py").write_text("def seen(images, prompts, count, size=3, **columns):\n    return count\n")
    reward = rewards.load("./seen.py")
    with pytest.raises(RewardError, match="the reward 'seen' needs a column 'count', the prompts have none"):
        reward(IMAGES, ["a", "b"], {"other": [1, 1]})
    assert reward(IMAGES, ["a", "b"], {"count": [1, 2]}).tolist() == [1, 2]


def test_a_file_may_hold_dataclasses_and_two_files_may_share_a_name(mine):
    (mine / "other").mkdir()
    head = "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Constant:\n"
    call = "    def __call__(self, images, prompts):\n        return [self.value] * len(prompts)\n"
    places = {"./r.py": 1.0, "./other/r.py": 2.0}
    for place, value in places.items():
        (mine / place).write_text(f"{head}    value: float = {value}\n{call}")
    loaded = {place: rewards.load(f"{place}:Constant") for place in places}
    for place, value in places.items():
        assert loaded[place](IMAGES, ["a", "b"], {}).tolist() == [value, value]


def test_what_a_module_raises_is_told_with_its_line(mine):
    for number, statement in enumerate(("nothing_of_that_name", "import sys; sys.exit(0)", "raise OSError"), start=1):
        (mine / f"bad{number}.py").write_text("import os\n" * number + statement + "\n")
    for number in (1, 2, 3):
        for use in (f"bad{number}:f", f"./bad{number}.py:f"):
            said = rf"could not be imported: (NameError: .*|SystemExit: 0|OSError) at bad{number}.py:{number + 1}$"
            with pytest.raises(RewardError, match=said):
                rewards.load(use)


def test_a_class_is_made_with_its_options(mine):
    reward = rewards.load("./mine.py:Scaled", options={"scale": 2.0})
    assert (reward.group_wise, reward(IMAGES, ["a", "bbb"], {}).tolist()) == (True, [2.0, 6.0])


def test_an_installed_package_offers_a_reward_by_its_entry_point(mine, monkeypatch):
    info = mine / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flowgrpo.rewards]\nvery_red = mine:redness\n")
    reward = rewards.load("very_red")
    torch.testing.assert_close(reward(IMAGES, ["a", "b"], {}), IMAGES[:, 0].mean((1, 2)).double())


@pytest.mark.parametrize(("use", "options", "said"), [
    ("shape", {}, "there is no reward 'shape', did you mean 'shapes'"),
    ("./nothing.py:f", {}, "there is no file nothing.py"),
    ("./mine.py:rednes", {}, "nothing is named 'rednes' there, it has redness"),
    ("./mine.py", {}, r"'./mine.py': say which of its names, ./mine.py:redness; it has redness, counted, Scaled$"),
    ("./nothing.py", {}, "there is no file nothing.py"),
    ("no.such.module:f", {}, "no.such.module could not be imported: ModuleNotFoundError"),
    ("./mine.py:THREE", {}, "is int, which cannot be called"),
    ("./mine.py:redness", {"scale": 1}, "is a function and takes no options"),
    ("./mine.py:Scaled", {"size": 1}, "the reward './mine.py:Scaled' has no option 'size', choose one of scale"),
        ("mine", {}, "there is no reward 'mine', did you mean './mine.py'"),
    ("./mine.py:Picky", {}, "could not be made \\(options: none\\): OSError: no weights at mine.py:14$"),
])  # fmt: skip
def test_what_cannot_be_found_is_explained(mine, use, options, said):
    with pytest.raises(RewardError, match=said):
        rewards.load(use, options=options)


@pytest.mark.parametrize(("more", "value"), [
    ("def red(images, prompts, **columns):\n    return [1.0] * len(prompts)\n", 1.0),
    ("class Red:\n    def __call__(self, images, prompts):\n        return [2.0] * len(prompts)\n", 2.0),
])  # fmt: skip
def test_the_only_reward_of_a_file_needs_no_name(mine, more, value):
    others = "import os\nclass Options:\n    size = 3\ndef mean(images):\n    return images.mean()\n"
    (mine / "only.py").write_text(others + "def scale(images, factor):\n    return images\n" + more)
    reward = rewards.load("./only.py")
    assert reward.name == "only"
    assert reward(IMAGES, ["a", "b"], {}).tolist() == [value, value]


@pytest.mark.parametrize(("text", "said"), [
    ("from pathlib import Path\n", r"./none.py:NAME; but it has no function or class$"),
    ("def mean(images):\n    return 1\nclass Size:\n    pass\n", r"which of its names, ./none.py:mean; it has mean, Size$"),
])  # fmt: skip
def test_a_file_without_a_reward_says_what_it_has(mine, text, said):
    (mine / "none.py").write_text(text)
    with pytest.raises(RewardError, match=said):
        rewards.load("./none.py")


@pytest.mark.parametrize(("returned", "said"), [
    ("[1.0]", "returned 1 values for 2 samples"), ("3.0", "returned one number, not a list of 2 floats"),
    ("['x', 'y']", "returned str for sample 0"), ("['1', '2']", "returned str for sample 0"),
    ("[1.0, b'2']", "returned bytes for sample 1"), ("'12'", "returned str, not a list of 2 floats"),
    ("b'12'", "returned bytes, not a list of 2 floats"),
    ("{0.5: 'a', 0.25: 'b'}", "returned dict, not a list of 2 floats"),
    ("{0.5, 0.25}", "returned set, not a list of 2 floats"),
    ("{0.5: 1, 0.25: 2}.keys()", "returned dict_keys, not a list of 2 floats"),
    ("images[:, 0, 0, :3]", r"returned a tensor of shape \(2, 3\), not one float for each of 2 samples \(reduce it, for"),
    ("images[:, 0, 0, 0].numpy()[:, None].repeat(4, 1)", r"returned a tensor of shape \(2, 4\), not one float"),
    ("list(images[:, 0, 0, :2])", "returned Tensor for sample 0"), ("[1.0, 10**400]", "returned NaN or infinity"),
    ("__import__('math').sqrt(-1)", r"failed on two synthetic samples: ValueError: .* at odd.py:2$"),
    ("__import__('sys').exit(0)", r"failed on two synthetic samples: SystemExit: 0 at odd.py:2$"),
    ("[1.0, float('nan')]", "returned NaN or infinity"), ("[1.0, float('inf')]", "returned NaN or infinity"),
    ("1 / 0", "failed on two synthetic samples: ZeroDivisionError"),
])  # fmt: skip
def test_a_broken_contract_is_found_on_synthetic_samples(mine, returned, said):
    (mine / "odd.py").write_text(f"def odd(images, prompts):\n    return {returned}\n")
    with pytest.raises(RewardError, match=said):
        rewards.load("./odd.py:odd").check(torch.rand(3, 8, 8), "a", {})


def test_a_class_that_loads_its_weights_in_to_has_them_before_it_is_tried(mine):
    (mine / "late.py").write_text(
        "class Late:\n    def __init__(self, path):\n        self.path = path\n"
        "    def to(self, device):\n        self.weights = {'mine': 2.0}[self.path]\n"
        "    def __call__(self, images, prompts):\n        return [self.weights] * len(prompts)\n"
    )
    rewards.load("./late.py", options={"path": "mine"}).check(torch.rand(3, 8, 8), "a", {})
    with pytest.raises(
        RewardError, match=r"the reward 'late' could not load or move to cpu: KeyError: 'nowhere' at late.py:5$"
    ):
        rewards.load("./late.py", options={"path": "nowhere"}).check(torch.rand(3, 8, 8), "a", {})


def test_what_a_reward_may_return(mine):
    arrays = "__import__('numpy').ones(2)", "__import__('torch').ones(2)", "__import__('torch').ones(2, 1)"
    for returned in ("[1, 2]", "(1.0, 2.0)", "[None, 1.0]", *arrays):
        (mine / "fine.py").write_text(f"def fine(images, prompts):\n    return {returned}\n")
        rewards.load("./fine.py:fine").check(torch.rand(3, 8, 8), "a", {})


def test_parts_are_consecutive_and_the_last_one_is_what_is_left():
    assert batched([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]
    assert batched([], 3) == []
    assert [part.tolist() for part in batched(torch.arange(3), 2)] == [[0, 1], [2]]


def test_what_a_generator_raises_is_its_own_error():
    def broken(images, prompts):
        yield 1.0
        yield None + 1

    with pytest.raises(TypeError, match="unsupported operand"):
        rewards.Reward("broken", broken)(torch.rand(2, 3, 4, 4), ["a", "b"], {})


@pytest.mark.parametrize(("word", "end"), [
    ("vgppo", "did you mean 'vgpo'?"),
    ("grpo", "did you mean 'flow_grpo'?"),  # a part of a choice before a word that is spelt like it
    ("vgp", "did you mean 'vgpo'?"),
    ("c_", "choose one of vgpo, flow_grpo, mc_grpo"),  # too short to be a part
    ("", "choose one of vgpo, flow_grpo, mc_grpo"),
])  # fmt: skip
def test_the_nearest_choice_contains_or_resembles_a_word(word, end):
    assert nearest(word, ["vgpo", "flow_grpo", "mc_grpo"]) == end


def test_the_only_function_of_a_file_is_taken_for_its_reward(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.py").write_text("def bright(images):\n    return images.mean((1, 2, 3))\n")
    with pytest.raises(RewardError, match="^the reward 'one' must take two arguments, samples and prompts, not 1"):
        rewards.load("./one.py").check(torch.zeros(3, 4, 4), "a", {})
