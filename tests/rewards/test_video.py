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


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 2, 100), (2, 1, 3, 8, 8)])
def test_motion_refuses_what_is_no_video(shape):
    with pytest.raises(ValueError, match="motion takes videos"):
        rewards.load("motion")(torch.zeros(shape), ["a", "b"], {})
