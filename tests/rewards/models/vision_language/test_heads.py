"""HPSv3, HPSv3++ and VideoAlign; what holds for every model's reward stands in test_model.py, for the first two.

The numbers of the released code were made by the classes that its users call, on the checkpoints of tiny_vision_language.py,
under the transformers that it pins, in float32 on a CPU with torch 2.15:

 - hpsv3: the PyPI package hpsv3 1.0.0, `hpsv3/inference.py` HPSv3RewardInferencer, with its train.py, qwen2vl_trainer.py,
   data_collator_qwen.py, utils.py and HPSv3_7B.yaml; transformers 4.45.2.
 - hpsv3_plus: github.com/PlantPotatoOnMoon/HPSv3-PlusPlus at 7bdbebc, `hpsv3/inference.py` HPSv3RewardInferencer, with its
   trainer/adaptive.py, qwen3vl_rm.py and train_stage2.yaml (cond_dim 8); `per_image_cap` set; transformers 4.57.0.
 - video_align: github.com/KwaiVGI/VideoAlign at 219ab9d, `inference.py` VideoVLMRewardInference, with its train_reward.py,
   trainer.py, prompt_template.py, vision_process.py and utils.py; transformers 4.45.2 and peft 0.10.0. Its reader of files
   was replaced by one that returns the frames, at 16 a second.

trl, datasets and plotting were empty modules, flash attention was off, the base model had random weights. All samples of a
list were one batch there.
"""

import json
import re
from pathlib import Path

import pytest
import tiny_vision_language as tiny
import torch
from safetensors.torch import save_file

import rewards
from rewards import RewardError
from rewards.models.vision_language.video_align import choose_frames

RELEASED = json.loads((Path(__file__).parents[3] / "data" / "vision_language_rewards.json").read_text())
PROMPTS = RELEASED["prompts"]
PICTURES = [tiny.picture(*size) for size in RELEASED["pictures"]]
VIDEOS = [tiny.video(*size) for size in RELEASED["videos"]]


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    return {
        "hpsv3": tiny.save_hpsv3(tmp_path_factory.mktemp("hpsv3")),
        "hpsv3_plus": tiny.save_hpsv3_plus(tmp_path_factory.mktemp("hpsv3_plus")),
        "video_align": tiny.save_video_align(tmp_path_factory.mktemp("video_align")),
    }


def load(name, options, **more):
    return rewards.load(name, options={**options, **more})


def scores(reward, samples):
    """Scores of samples of several shapes, each of which is a call."""
    return [reward(sample[None], [prompt], {}).item() for sample, prompt in zip(samples, PROMPTS, strict=False)]


def test_hpsv3_gives_the_scores_of_the_released_code(options):
    """There the three pictures are one padded batch, resized by PIL."""
    assert scores(load("hpsv3", options["hpsv3"]), PICTURES) == pytest.approx(RELEASED["hpsv3"], abs=1e-4)


@pytest.mark.parametrize("iteration", [0.0, 0.3])
def test_hpsv3_plus_gives_the_scores_of_the_released_code(options, iteration):
    reward = load("hpsv3_plus", options["hpsv3_plus"], iteration=iteration)
    assert scores(reward, PICTURES) == pytest.approx(RELEASED["hpsv3_plus"][str(iteration)], abs=1e-4)


@pytest.mark.parametrize(("kind", "chosen"), [("adapted", ["overall", "MQ"]), ("whole", ["TA", "VQ"])])
def test_video_align_gives_the_scores_of_the_released_code(options, tmp_path, kind, chosen):
    """As released: one output of the head, adapters beside the weights. And as its train.sh makes it: three outputs."""
    whole = kind == "whole"
    given = tiny.save_video_align(tmp_path, 3, adapted=False, norm=None) if whole else options["video_align"]
    for video, prompt, score, i in zip(VIDEOS, PROMPTS, chosen, range(2), strict=False):
        found = load("video_align", given, score=score)(video[None], [prompt], {}).item()
        assert found == pytest.approx(RELEASED["video_align"][kind][score][i], abs=1e-4)


def test_a_checkpoint_of_later_transformers_scores_the_same(options, tmp_path):
    """Since 4.52 the names of Qwen2-VL have another `model.` or `language_model.`."""
    old = tiny.weights(Path(options["hpsv3"]["base"]), tiny.ranknet())
    new = {
        re.sub("^visual", "model.visual", re.sub("^model", "model.language_model", name)): w for name, w in old.items()
    }
    assert old.keys() != new.keys()
    save_file(new, tmp_path / "new.safetensors")
    reward = load("hpsv3", options["hpsv3"], path=str(tmp_path / "new.safetensors"))
    assert scores(reward, PICTURES[2:]) == scores(load("hpsv3", options["hpsv3"]), PICTURES[2:])


@pytest.mark.parametrize(("count", "fps", "chosen"), [
    (33, 16, [0, 11, 21, 32]),  # 4.1 frames
    (72, 16, [0, 10, 20, 30, 41, 51, 61, 71]),  # 9: half of it, 4.5, is rounded to even
    (5, 16, [0, 1, 3, 4]), (3, 16, [0, 2]), (2, 1, [0, 1]),  # at least 4, if there are so many
    (49, 24, [0, 16, 32, 48]), (4, 0.5, [0, 1, 2, 3]),
])  # fmt: skip
def test_frames_are_evenly_spaced_and_even_in_number(count, fps, chosen):
    assert choose_frames(count, fps, 2.0) == chosen


def test_a_long_video_shows_768_frames():
    chosen = choose_frames(10_000, 8, 2.0)
    assert (len(chosen), chosen[0], chosen[-1]) == (768, 0, 9_999)


@pytest.mark.parametrize(("name", "more", "said"), [
    ("video_align", {"fps": 0}, "fps is 0, but must be above 0: name the frames a second of your videos"),
    ("video_align", {"score": "motion"}, "there is no score 'motion', choose one of overall, VQ, MQ, TA"),
    ("hpsv3_plus", {"iteration": 300}, "iteration is 300, but must be 0 to 1"),
    ("hpsv3", {"base": "./qwen"}, r"there is no \./qwen, give a path that is there or a hub id such as"),
    ("hpsv3", {"path": "./no/folder"}, r"there is no \./no/folder"),
    ("hpsv3_plus", {"base": None}, "Qwen/Qwen3-VL-8B-Instruct could not be loaded from the model hub: HF_HUB"),
])  # fmt: skip
def test_a_wrong_option_is_one_sentence(options, name, more, said):
    with pytest.raises(RewardError, match=rf"^{name}: {said}[^\n]*$"):
        load(name, options[name], **more).function.to("cpu")


def test_the_frame_rate_must_be_told(options):
    given = {name: value for name, value in options["video_align"].items() if name != "fps"}
    with pytest.raises(
        RewardError, match="^video_align: fps is None, but must be above 0: name the frames a second of your videos$"
    ):
        rewards.load("video_align", options=given)


@pytest.mark.parametrize(("lost", "said"), [
    ("rm_head.", r"none of its weights is named rm_head\.\*"),
    ("model.embed_tokens", r"lacks the weights of language_model\.embed_tokens\.weight$"),
    ("model.layers.1.mlp.up", r"lacks 1 of the \d+ weights of Qwen2VLModel \(language_model\.layers\.1\.mlp\.up_proj\."),
])  # fmt: skip
def test_a_checkpoint_that_is_not_complete_is_refused(options, tmp_path, lost, said):
    whole = tiny.weights(Path(options["hpsv3"]["base"]), tiny.ranknet())
    save_file({name: w for name, w in whole.items() if not name.startswith(lost)}, tmp_path / "part.safetensors")
    with pytest.raises(RewardError, match=rf"^hpsv3: \S*part\.safetensors [^\n]*{said}[^\n]*$"):
        load("hpsv3", options["hpsv3"], path=str(tmp_path / "part.safetensors")).function.to("cpu")


def test_a_base_with_another_tokenizer_is_refused(options, tmp_path):
    other = tiny.save_base(tmp_path, "qwen2_vl", whole_words=True)
    (other / "tokenizer.json").write_text(
        (other / "tokenizer.json").read_text().replace("<|video_pad|>", "<|MQ_reward|>")
    )
    with pytest.raises(
        RewardError, match=r"^video_align: \S* embeds 266 tokens, but \S* has 265 with those of the head$"
    ):
        load("video_align", options["video_align"], base=str(other)).function.to("cpu")


@pytest.mark.parametrize(("file", "content", "said"), [
    ("checkpoint-7/model.pth", None, "there is no checkpoint-11352/model.pth in"),
    ("model_config.json", None, "there is no model_config.json in"),
    ("model_config.json", "{", "could not be loaded"),
    ("model_config.json", '{"data_config": {"prompt_template_type": "simple"}}', "prompt_template_type 'simple', but only"),
])  # fmt: skip
def test_a_folder_of_video_align_that_is_not_whole_is_one_sentence(tmp_path, file, content, said):
    given = tiny.save_video_align(tmp_path)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(RewardError, match=rf"^video_align: [^\n]*{said}[^\n]*$"):
        load("video_align", given).function.to("cpu")


def test_a_prompt_with_a_token_of_the_head_is_refused(options):
    with pytest.raises(RewardError, match=r"^hpsv3: the prompt 'a <\|Reward\|>' contains <\|Reward\|>$"):
        load("hpsv3", options["hpsv3"])(PICTURES[2][None], ["a <|Reward|>"], {})


def test_a_base_of_another_kind_is_refused(options):
    other = options["hpsv3"]["base"]
    with pytest.raises(RewardError, match=f"^hpsv3_plus: {other} holds a model of type qwen2_vl, not qwen3_vl$"):
        load("hpsv3_plus", options["hpsv3_plus"], base=other).function.to("cpu")


def test_a_still_is_no_video(options):
    with pytest.raises(ValueError, match=r"video_align takes videos \(B, F, 3, H, W\) of 2 frames"):
        load("video_align", options["video_align"]).function(torch.rand(1, 1, 3, 64, 64), ["a"])
