import pytest
import torch

import rewards


def test_motion_is_the_mean_step_between_frames():
    still = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(0)).expand(5, 3, 4, 4)
    flicker = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]).view(5, 1, 1, 1).expand(5, 3, 4, 4)
    corner = torch.zeros(5, 3, 4, 4)
    corner[2, :, 0, 0] = 0.8  # on for one frame: 2 of 4 steps, 1 of 16 pixels
    values = rewards.load("motion")(torch.stack([still, flicker, corner]), ["a", "b", "c"], {})
    assert values.tolist() == pytest.approx([0.0, 1.0, 0.8 / 2 / 16])


def flat(*levels):
    return torch.tensor(levels).view(1, -1, 1, 1, 1).expand(1, len(levels), 3, 16, 16)


def test_temporal_consistency_is_the_likeness_with_the_frame_before_and_the_first():
    likeness = (2 * 0.2 * 0.6 + 1e-4) / (0.2**2 + 0.6**2 + 1e-4)  # of two flat frames: only their levels differ
    values = rewards.load("temporal_consistency")(torch.cat([flat(0.2, 0.6, 0.6), flat(0.2, 0.6, 0.2)]), ["a", "b"], {})
    expected = [(likeness + (1 + likeness) / 2) / 2, (likeness + (likeness + 1) / 2) / 2]
    assert values.tolist() == pytest.approx(expected, abs=3e-4)


def test_a_pattern_and_its_negative_are_least_alike():
    checked = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).repeat(8, 8).expand(3, 16, 16)
    videos = torch.stack([checked, 1 - checked])[None]
    (value,) = rewards.load("temporal_consistency")(videos, ["a"], {})
    assert value.item() == pytest.approx((9e-4 - 0.5) / (9e-4 + 0.5), rel=1e-5)


def test_a_still_earns_most_then_what_moves_smoothly_then_the_same_frames_in_disorder():
    y, x = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    discs = torch.stack([((x - 6 - i) ** 2 + (y - 16) ** 2 < 30).float() for i in range(12)])
    frames = discs[:, None].expand(-1, 3, -1, -1)
    still, disorder = frames[:1].expand(12, -1, -1, -1), frames[[0, 8, 3, 11, 1, 6, 2, 9, 4, 10, 5, 7]]
    values = rewards.load("temporal_consistency")(torch.stack([still, frames, disorder]), ["a"] * 3, {})
    assert values[0] == 1
    assert values[0] - 0.05 > values[1] > values[2] + 0.02


@pytest.mark.parametrize(("name", "shapes"), [
    ("motion", [(2, 3, 8, 8), (2, 2, 100), (2, 1, 3, 8, 8)]),
    ("temporal_consistency", [(2, 3, 8, 8), (2, 1, 3, 8, 8), (2, 4, 3, 4, 8), (2, 4, 1, 8, 8)]),
])  # fmt: skip
def test_what_is_no_such_video_is_refused(name, shapes):
    for shape in shapes:
        with pytest.raises(ValueError, match=f"{name} takes videos"):
            rewards.load(name)(torch.zeros(shape), ["a", "b"], {})
