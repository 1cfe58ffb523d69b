"""Rewards of pictures on chosen frames of a video."""

import pytest
import torch

from rewards import Reward, RewardError, load
from rewards.files import frames


@pytest.mark.parametrize(("rule", "count", "chosen"), [
    ("first", 9, [0]), ("middle", 9, [4]), ("middle", 8, [3]), ("all", 3, [0, 1, 2]), ("every 4", 9, [0, 4, 8]),
    ("every 1", 2, [0, 1]), ("every 20", 9, [0]), (1, 9, [0]), (3, 9, [0, 4, 8]), (8, 3, [0, 1, 2]), (3, 1, [0]),
])  # fmt: skip
def test_a_rule_chooses_frames(rule, count, chosen):
    assert frames.choose(rule, count) == chosen


@pytest.mark.parametrize("rule", ["last", "every 0", "every", "", 0, -1, True, 2.5])
def test_another_rule_is_refused(rule):
    with pytest.raises(ValueError, match="frames: there is no rule .*, take first, middle, all, every N, or a number"):
        frames.choose(rule, 4)
    with pytest.raises(RewardError, match="there is no rule"):
        load("jpeg_size", frames=rule)


def test_the_reward_is_the_mean_over_the_chosen_frames():
    videos = torch.arange(10.0).view(2, 5, 1, 1, 1).expand(2, 5, 3, 4, 4)
    reward = Reward(
        "level",
        lambda images, prompts: [None if p else x for x, p in zip(images[:, 0, 0, 0], prompts, strict=True)],
        frames="every 3",
    )
    assert reward(videos, ["", ""], {}).tolist() == [1.5, 6.5]  # frames 0 and 3
    assert reward(videos, ["", "none"], {}).isnan().tolist() == [False, True]


def test_a_group_is_compared_frame_by_frame():
    def rank(images, prompts):
        return images[:, 0, 0, 0].argsort().argsort().tolist()

    videos = torch.tensor([[0.1, 0.9, 0.2], [0.5, 0.1, 0.6]])[..., None, None, None].expand(2, 3, 3, 2, 2)
    assert Reward("rank", rank, group_wise=True, frames="all")(videos, ["x"] * 2, {}).tolist() == pytest.approx(
        [1 / 3, 2 / 3]
    )


def test_features_are_means_over_the_chosen_frames():
    class Corner:
        def __call__(self, images, prompts):
            raise AssertionError

        def features(self, images, prompts):
            return images[:, :2, 0, 0]

    videos = torch.arange(20.0).view(2, 5, 2, 1, 1).expand(2, 5, 2, 4, 4)
    assert Reward("corner", Corner(), frames=2).features(videos, ["", ""]).tolist() == [[4, 5], [14, 15]]
    assert Reward("level", lambda images, prompts: images[:, 0, 0, 0], frames="first").features(
        videos, []
    ).tolist() == [0, 10]


def test_a_reward_of_videos_takes_no_frames():
    with pytest.raises(RewardError, match="the reward 'motion' sees videos itself; leave frames out"):
        load("motion", frames="first")


@pytest.mark.parametrize("samples", [torch.zeros(1, 3, 8, 8), ["a text"]])
def test_what_is_no_video_has_no_frames(samples):
    with pytest.raises(RewardError, match="the reward 'jpeg_size' has frames=first, which chooses from videos"):
        load("jpeg_size", frames="first")(samples, ["x"], {})
