import json

import pytest
import tiny_rewards
import torch

import rewards
from rewards import RewardError

# Of the authors' Scorer (their repository at 6 September 2025, transformers 4.36.1, float32) with the weights of
# `tiny_rewards.save_deqa` and the pictures below.
RELEASED = {
    (56, 56): 3.556269884109497,
    (40, 56): 3.5575785636901855,
    (64, 30): 3.5196456909179688,
    (112, 112): 3.5655996799468994,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_rewards.save_deqa(tmp_path_factory.mktemp("deqa"))


def load(folder, **options):
    return rewards.load("deqa", options={"path": str(folder), "dtype": "float32", **options})


def test_the_score_is_that_of_the_released_code(folder):
    generator, reward = torch.Generator().manual_seed(0), load(folder)
    for size, score in RELEASED.items():
        picture = torch.rand(1, 3, *size, generator=generator).mul(255).round() / 255
        assert reward(picture, ["any"], {}).item() == pytest.approx(score, abs=1e-4)


def test_bars_have_the_mean_colour(folder):
    """A picture of that colour alone scores as much whatever its shape."""
    colour = torch.tensor([122.0, 116.0, 104.0])[:, None, None] / 255
    reward = load(folder)
    scores = [reward(colour.expand(1, 3, *size), [""], {}).item() for size in ((56, 56), (20, 56), (56, 31))]
    assert scores[1:] == pytest.approx(scores[:1] * 2, abs=1e-6)


def test_the_model_is_half_precision_unless_told_otherwise(folder):
    reward = rewards.load("deqa", options={"path": str(folder)}).function
    assert {parameter.dtype for parameter in reward.model.parameters()} == {torch.float16}


def test_a_folder_of_another_model_is_refused(tmp_path):
    tiny_rewards.save_clip(tmp_path)
    with pytest.raises(RewardError, match=rf"^deqa: {tmp_path} holds a model of type clip, not mplug_owl2$"):
        load(tmp_path).function.to("cpu")


def test_a_checkpoint_that_is_not_complete_is_refused(folder, tmp_path):
    tiny_rewards.save_deqa(tmp_path)
    weights = torch.load(tmp_path / "pytorch_model.bin")
    del weights["model.layers.1.self_attn.k_proj.multiway.1.weight"]
    torch.save(weights, tmp_path / "pytorch_model.bin")
    said = r"lacks 1 of the 112 weights of DeqaNetwork \(model\.layers\.1\.self_attn\.k_proj\.multiway\.1\.weight\)$"
    with pytest.raises(RewardError, match=rf"^deqa: {tmp_path} {said}"):
        load(tmp_path).function.to("cpu")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["visual_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RewardError, match=rf"^deqa: {tmp_path} could not be loaded [^\n]*visual_config[^\n]*$"):
        load(tmp_path).function.to("cpu")
