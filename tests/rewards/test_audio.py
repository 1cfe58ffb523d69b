import math

import pytest
import torch

import rewards


def test_loudness_is_the_root_mean_square():
    sine = torch.sin(torch.arange(1000) * 2 * math.pi / 50)  # 20 whole periods
    silence_and_square = torch.stack([torch.zeros(1000), torch.tensor([0.5, -0.5]).repeat(500)])
    beyond = torch.full((1000,), -3.0)
    audio = torch.stack([sine.expand(2, -1), silence_and_square, beyond.expand(2, -1)])
    values = rewards.load("loudness")(audio, ["a", "b", "c"], {})
    assert values.tolist() == pytest.approx([1 / math.sqrt(2), 0.5 / math.sqrt(2), 1.0])


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 5, 3, 8, 8)])
def test_loudness_refuses_what_is_no_audio(shape):
    with pytest.raises(ValueError, match="loudness takes audio"):
        rewards.load("loudness")(torch.zeros(shape), ["a", "b"], {})
