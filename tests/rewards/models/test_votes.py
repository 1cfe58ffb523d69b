"""What is learned from votes, against what cast them."""

import json
import logging
import math

import numpy as np
import pytest
import torch
from PIL import Image

from rewards import RewardError, load
from rewards.models.votes import fit, learn, read_votes


def drawn(number, weights, seed=0, ties=0):
    """Features of pairs, and the votes of one who compares them by these weights."""
    generator = np.random.default_rng(seed)
    first, second = generator.normal(size=(2, number, len(weights)))
    outcomes = ((first - second) @ weights > 0).astype(float)
    outcomes[:ties] = 0.5
    return first, second, outcomes


def test_one_gap_has_the_weight_at_which_loss_and_prior_balance():
    """The derivative of log(1 + e^-w) + w^2 / 2 is 0 where w = 1 / (1 + e^w): w is 0.4010581."""
    found = fit(np.array([[1.0]]), np.array([1.0]), 1.0)
    assert found == pytest.approx([0.4010581375], abs=1e-9)
    assert fit(np.array([[2.0], [-2.0]]), np.array([0.5, 0.5]), 1.0) == pytest.approx([0.0])


def test_more_features_than_votes_are_solved_in_the_span_of_the_votes():
    first, second, outcomes = drawn(6, np.ones(50))
    gaps = first - second
    found = fit(gaps, outcomes, 0.3)
    chance = 1 / (1 + np.exp(-gaps @ found))
    np.testing.assert_allclose(gaps.T @ (chance - outcomes) + 0.3 * found, 0, atol=1e-7)  # the gradient is 0


def test_forty_votes_find_the_direction_and_tell_how_well():
    weights = np.array([2.0, -1.0, 0.0, 0.5])
    learned = learn(*drawn(40, weights))
    direction = learned.weights / learned.std
    assert direction @ weights / np.linalg.norm(direction) / np.linalg.norm(weights) > 0.9
    assert learned.agreement > 0.8
    first, second, outcomes = drawn(400, weights, seed=1)
    right = (learned(first) > learned(second)) == (outcomes > 0.5)
    assert right.mean() > 0.85
    assert learned(np.stack([learned.mean])) == pytest.approx([0.0])


def test_coins_teach_little():
    first, second, _ = drawn(60, np.ones(3))
    coins = np.random.default_rng(3).integers(0, 2, 60).astype(float)
    learned = learn(first, second, coins)
    assert learned.agreement < 0.65
    assert learned.strength > 1
    assert learn(first, second, np.full(60, 0.5)).weights == pytest.approx(np.zeros(3), abs=1e-9)
    assert math.isnan(learn(first, second, np.full(60, 0.5)).agreement)


def written(folder):
    """Votes that prefer the lighter of two pictures, and their file."""
    for name, grey in {"dark": 20, "middle": 120, "light": 230}.items():
        Image.new("RGB", (8, 8), (grey, grey, grey)).save(folder / f"{name}.png")
    pairs = [("light.png", "dark.png", "a"), ("dark.png", "middle.png", "b"), ("light.png", "middle.png", "a")]
    lines = [{"prompt": "grey", "a": a, "b": b, "vote": vote} for a, b, vote in pairs * 2]
    lines.append({"prompt": "grey", "a": "dark.png", "b": "dark.png", "vote": "neither"})
    file = folder / "votes.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "mine.py").write_text(
        "def lightness(images, prompts):\n    return images.mean((1, 2, 3)).tolist()\n\n\n"
        "class Two:\n    def __call__(self, images, prompts):\n        raise AssertionError\n\n"
        "    def features(self, images, prompts):\n        return images.flatten(2).mean(2)\n"
    )
    return file


def votes(folder, of=None):
    """The reward of such votes, over the lightness of a picture or what else is named."""
    return load("votes", options={"file": str(written(folder)), "of": of or f"{folder}/mine.py:lightness"})


@pytest.mark.parametrize("of", ["mine.py:lightness", "mine.py:Two", ["mine.py:lightness", "jpeg_size"]])
def test_the_reward_prefers_what_was_voted_for(tmp_path, of):
    uses = [of] if isinstance(of, str) else of
    uses = [str(tmp_path / use) if ".py" in use else use for use in uses]
    reward = votes(tmp_path, uses)
    greys = torch.tensor([0.1, 0.5, 0.9])[:, None, None, None].expand(-1, 3, 8, 8)
    dark, middle, light = reward(greys, ["grey"] * 3, {})
    assert dark < middle < light


def test_the_reward_of_the_features_may_be_a_map_with_options(tmp_path):
    pictures, of = torch.rand(3, 3, 8, 8), {"use": f"{tmp_path}/mine.py:lightness"}
    by_map, by_name = (reward(pictures, ["grey"] * 3, {}) for reward in (votes(tmp_path, of), votes(tmp_path)))
    assert by_map.equal(by_name)


def test_films_are_voted_on_by_a_reward_of_videos(tmp_path):
    file = written(tmp_path)
    for name, change in {"dark": 20, "middle": 90, "light": 200}.items():  # votes are for motion
        frames = [Image.new("RGB", (8, 8), (shade, shade, shade)) for shade in (0, change)]
        frames[0].save(tmp_path / f"{name}.gif", save_all=True, append_images=frames[1:])
    file.write_text(file.read_text().replace(".png", ".gif"))
    reward = load("votes", options={"file": str(file), "of": "motion"})
    lightness = {"use": f"{tmp_path}/mine.py:lightness", "frames": 1}
    by_frame = load("votes", options={"file": str(file), "of": lightness})
    assert by_frame.function._rewards[0].frames == 1
    still, moving = reward(
        torch.tensor([[0.0, 0.1], [0.0, 0.9]])[..., None, None, None].expand(2, 2, 3, 8, 8), ["x"] * 2, {}
    )
    assert still < 0 < moving


def test_pref_grpo_takes_what_was_learned(tmp_path):
    options = {"file": str(written(tmp_path)), "of": f"{tmp_path}/mine.py:lightness"}
    preference = load("preference", options={"scores": {"use": "votes", "options": options}})
    assert preference.group_wise
    greys = torch.tensor([0.2, 0.9, 0.5])[:, None, None, None].expand(-1, 3, 8, 8)
    rates = preference(greys, ["grey"] * 3, {})
    odds = votes(tmp_path)(greys, ["grey"] * 3, {})
    chances = torch.sigmoid(odds[:, None] - odds)
    assert rates.tolist() == pytest.approx(((chances.sum(1) - 0.5) / 2).tolist())
    assert rates[1] > rates[2] > rates[0]


def test_votes_that_say_nothing_are_told(tmp_path, caplog):
    file = written(tmp_path)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [{**line, "vote": vote} for line in lines[:1] for vote in ("a", "b") * 6]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    reward = load("votes", options={"file": str(file), "of": f"{tmp_path}/mine.py:lightness"})
    with caplog.at_level(logging.WARNING):
        reward(torch.rand(2, 3, 8, 8), ["grey"] * 2, {})
    assert "hardly more than a coin" in caplog.text


@pytest.mark.parametrize(("line", "sentence"), [
    ('{"prompt": "x"}', "line 8 of"), ('{"prompt": "x", "a": "1", "b": "2", "vote": "both"}', "one of a, b, neither"),
    ("half a li", "is no vote"),
])  # fmt: skip
def test_a_line_that_is_no_vote_is_named(tmp_path, line, sentence):
    file = written(tmp_path)
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(RewardError, match=sentence):
        read_votes(file)


def test_what_cannot_be_learned_is_refused(tmp_path):
    file, mine = written(tmp_path), str(tmp_path / "mine.py")
    few = tmp_path / "few.jsonl"
    few.write_text("".join(f"{line}\n" for line in file.read_text().splitlines()[:4]))
    for votes_file, of, said in (
        (tmp_path / "none.jsonl", "jpeg_size", "there is no file"),
        (file, "diversity", "diversity compares the samples of a group"),
        (file, {"use": mine, "weight": 2}, "a name or a map of use and options"),
        (few, "jpeg_size", "has 4 votes for one of two, and 5 are the fewest"),
    ):
        with pytest.raises(RewardError, match=said):
            load("votes", options={"file": str(votes_file), "of": of})
    reward = load("votes", options={"file": str(file), "of": f"{mine}:lightness"})
    (tmp_path / "light.png").unlink()
    with pytest.raises(RewardError, match=r"light\.png"):
        reward.function.learned()


def test_what_a_caption_has_is_what_the_shapes_reward_sees():
    from rewards.shapes import BACKGROUND, COLOURS, features, shapes

    picture = torch.tensor(BACKGROUND)[:, None, None].repeat(1, 64, 64)
    for left, colour in ((8, "red"), (40, "blue")):
        picture[:, 24:40, left : left + 16] = torch.tensor(COLOURS[colour])[:, None, None]
    pictures = picture.expand(4, 3, 64, 64)
    asked = ["a red square and a blue square", "a red circle", "two red squares", "a blue square left of a red square"]
    assert features(pictures, asked) == [[1, 1, 1, 1], [0, 1, 0, 1], [0.5, 0.5, 1, 1], [1, 1, 1, 0]]
    assert shapes(pictures, asked) == [1.0, 0.0, 0.5, 0.5]
