"""Memory of the rewards that a run loads beside its model."""

import pytest

from flowgrpo import config
from flowgrpo.commands.scores.rewards import options_of
from flowgrpo.training.planning.reward_memory import reward_bytes, uncounted_rewards
from rewards import BUILT_IN

GB = 10**9


def found(*uses, watched=()):
    settings = config.validate({"model": {"path": "shapes"}, "rewards": list(uses), "eval_rewards": list(watched)})
    return reward_bytes(settings), uncounted_rewards(settings)


def test_the_weights_of_rewards_are_those_that_their_cards_name():
    assert found("geneval") == (2.0 * GB, [])  # 0.3 GB and 1.7
    assert found("jpeg_size", "./mine.py:reward") == (0, ["./mine.py:reward"])
    assert found("pickscore", watched=["clip_score", {"use": "pickscore", "name": "again"}]) == (9.5 * GB, [])


@pytest.mark.parametrize(("use", "dtype", "size"), [
    ("pickscore", "bfloat16", 1.95), ("vqa_score", None, 16.6), ("vqa_score", "float32", 33.2),
    ("deqa", "bfloat16", 16.4), ("aesthetic_v25", "float16", 0.8515), ("ocr", None, 0),
])  # fmt: skip
def test_weights_have_the_size_of_the_dtype_that_they_are_loaded_in(use, dtype, size):
    assert found({"use": use, "options": {"dtype": dtype} if dtype else {}}) == (pytest.approx(size * GB), [])


@pytest.mark.parametrize("use", [
    "http://127.0.0.1:8100/hpsv2", {"use": "unified_reward", "options": {"endpoint": "http://127.0.0.1:8000/v1"}},
    {"use": "preference", "options": {"endpoint": "http://127.0.0.1:8000/v1"}},
])  # fmt: skip
def test_served_rewards_take_nothing(use):
    assert found(use) == (0, [])


@pytest.mark.parametrize("use", [
    {"use": "vqa_score", "options": {"path": "Qwen/Qwen2.5-VL-3B-Instruct"}}, "votes",
    {"use": "preference", "options": {"scores": "votes"}},
])  # fmt: skip
def test_weights_of_unknown_size_are_named(use):
    assert found(use) == (0, [use if isinstance(use, str) else use["use"]])


def test_the_path_of_the_card_is_the_default():
    assert found({"use": "hpsv2", "options": {"path": "xswu/HPSv2"}}) == (4 * GB, [])


@pytest.mark.parametrize("name", [name for name, card in BUILT_IN.items() if card.size])
def test_a_card_names_the_dtype_that_a_reward_has_by_default(name):
    assert (options_of(name) or {}).get("dtype") == BUILT_IN[name].dtype
