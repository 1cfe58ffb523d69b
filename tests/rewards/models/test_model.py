"""What must hold for any weights of any reward that holds a model."""

import re
import shutil
from pathlib import Path

import pytest
import tiny_rewards
import torch
from safetensors.torch import load_file, save_file
from torchvision.transforms.functional import to_pil_image

import rewards
from rewards import BUILT_IN, RewardError

PROMPTS = ["a red circle", "two dog barks", "a red circle", "a", "a blue square of two dog red circle a a"]


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    folder = tmp_path_factory.mktemp("held")
    return {name: tiny_rewards.options(name, folder / name) for name in tiny_rewards.NAMES}


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Images or sounds, and columns, by the name of the reward."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(5, 3, 40, 56, generator=generator)
    images[1], images[2, 0], images[3] = 0.2, 0.0, torch.linspace(0, 1, 56)
    sounds = torch.randn(5, 2, 12000, generator=generator) * torch.tensor([0.1, 0.5, 0.01, 0.3, 0.2])[:, None, None]
    sounds[1] = torch.sin(torch.arange(12000) * 0.3)
    files = [str(tmp_path_factory.mktemp("references") / f"{i}.png") for i in (0, 1, 2)]
    for file in files:
        to_pil_image(torch.rand(3, 30, 50, generator=generator)).save(file)
    columns = {"image": [files[i] for i in (0, 1, 0, 2, 2)], "sampling_rate": [8000, 16000, 8000, 12000, 8000]}
    return {name: (sounds if name == "clap" else images, columns) for name in tiny_rewards.NAMES}


@pytest.fixture(scope="module")
def loaded(options):
    return {name: rewards.load(name, options=options[name]) for name in tiny_rewards.NAMES}


def scores(reward, samples, rows=range(5)):
    inputs, columns = samples[reward.name]
    rows = list(rows)
    return reward(inputs[rows], [PROMPTS[i] for i in rows], {k: [v[i] for i in rows] for k, v in columns.items()})


held = pytest.mark.parametrize("name", tiny_rewards.NAMES)


@pytest.mark.usefixtures("cudnn_attention")
def test_cudnn_computes_no_attention_of_a_reward(options, samples):
    """Else a server, which has no policy, would score by another kernel than the process that trains."""
    name = tiny_rewards.NAMES[0]
    scores(rewards.load(name, options=options[name]), samples)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@held
def test_scores_do_not_depend_on_the_batch_size_or_the_order(name, loaded, samples, monkeypatch):
    expected = scores(loaded[name], samples)
    assert expected.isfinite().all()
    assert expected.std() > 1e-3
    order = [3, 1, 4, 0, 2]
    for size in (1, 2, 5):
        monkeypatch.setattr(loaded[name].function, "batch_size", size)
        torch.testing.assert_close(scores(loaded[name], samples, order), expected[order], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", sorted(set(tiny_rewards.NAMES) - {"diversity"}))
def test_a_sample_scores_the_same_whatever_stands_beside_it(name, loaded, samples):
    alone = torch.cat([scores(loaded[name], samples, [i]) for i in range(5)])
    torch.testing.assert_close(scores(loaded[name], samples), alone, atol=2e-5, rtol=2e-5)


@held
def test_the_same_numbers_nearly_in_half_precision(name, loaded, options, samples):
    full = scores(loaded[name], samples)
    half = scores(rewards.load(name, options={**options[name], "dtype": "bfloat16"}), samples)
    assert not torch.equal(full, half)
    assert torch.corrcoef(torch.stack([full, half]))[0, 1] > 0.95
    assert (full - half).abs().max() < 0.2 * full.abs().max()


@held
def test_nothing_is_loaded_before_the_first_call_or_the_move(name, options, samples):
    reward = rewards.load(name, options={**options[name], "dtype": "bfloat16"}).function
    assert "model" not in vars(reward)
    reward.to("meta")
    first = next(reward.model.parameters())
    assert (first.device.type, first.dtype) == ("meta", torch.bfloat16)
    assert not any(p.requires_grad for p in reward.model.parameters())
    assert not reward.model.training


MISSING = (
    "nobody/nothing could not be loaded from the model hub: HF_HUB_OFFLINE is set, and the cache lacks it or a part of it; "
    "download it once with `hf download nobody/nothing`, or give a folder that holds it$"
)


@held
@pytest.mark.parametrize(("more", "said"), [
    ({"path": "./no/folder"}, "there is no ./no/folder, give a path that is there or a hub id such as"),
    ({"path": "nobody/nothing"}, MISSING), ({"path": "./empty"}, r"[^\n]*\bempty\b[^\n]*$"),
    ({"dtype": "float17"}, "there is no dtype 'float17', did you mean 'float1"),
    ({"batch_size": 0}, "batch_size is 0, but must be 1 or more"),
])  # fmt: skip
def test_what_cannot_be_had_is_one_sentence_in_the_name_of_the_reward(name, more, said, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    with pytest.raises(RewardError, match=f"^{name}: {said}"):
        rewards.load(name, options={**options[name], **more}).function.to("cpu")


@pytest.mark.parametrize("name", sorted(set(tiny_rewards.NAMES) - {"clap"}))
def test_other_modalities_are_refused_before_anything_is_loaded(name):
    for shape in ((2, 5, 3, 16, 16), (2, 2, 400)):
        with pytest.raises(ValueError, match=rf"{name} takes images \(B, 3, H, W\), not shape"):
            rewards.load(name).function(torch.rand(shape), ["a", "b"])


@held
def test_a_card_says_where_the_weights_are_and_what_they_may_be_used_for(name):
    assert rewards.load(name).function.weights in BUILT_IN[name].weights
    assert BUILT_IN[name].licence
    assert f"use: {name}" in type(rewards.load(name).function).__doc__


def test_a_model_of_another_kind_is_refused(options):
    folder = options["diversity"]["path"]
    with pytest.raises(RewardError, match=f"^pickscore: {folder} holds a model of type dinov2, not clip$"):
        rewards.load("pickscore", options={"path": folder}).function.to("cpu")


def test_weights_that_are_not_complete_are_refused_without_a_table(options, tmp_path, capfd):
    shutil.copytree(options["clip_score"]["path"], tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["logit_scale"], weights["visual_projection.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    said = f"lacks 2 of the {2 + len(weights)} weights of CLIPModel (logit_scale, visual_projection.weight)"
    with pytest.raises(RewardError, match=f"^clip_score: {tmp_path} {re.escape(said)}$"):
        rewards.load("clip_score", options={"path": str(tmp_path)}).function.to("cpu")
    assert capfd.readouterr().err == ""
