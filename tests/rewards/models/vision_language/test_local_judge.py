import math

import pytest
import tiny_asked as tiny
import torch
from torch import nn
from torchvision.transforms.functional import to_pil_image
from transformers import AutoModelForImageTextToText, AutoProcessor

import rewards
from rewards import BUILT_IN, RewardError

PROMPTS = ["a red circle", "two {dogs}"]
ONE_TO_FIVE = [str(n) for n in range(1, 6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save_qwen(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl")


@pytest.fixture(scope="module")
def images():
    return torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(0)).mul(255).round() / 255


def load(name, folder, **options):
    """A judge that says nothing but `words`, by a bias on the logits of all other tokens."""
    words = options.pop("words", ONE_TO_FIVE)
    reward = rewards.load(name, options={"path": str(folder), "dtype": "float32", **options})
    tokenizer, head = reward.function.processor.tokenizer, reward.function.model.lm_head
    head.bias = nn.Parameter(torch.full((head.out_features,), -50.0), requires_grad=False)
    head.bias[[tokenizer.convert_tokens_to_ids(word) for word in words]] = 0.0
    return reward


def logits_of(folder, image, question, words=ONE_TO_FIVE):
    """Logits of the first token of an answer to one question, by the model as transformers loads it."""
    processor, model = AutoProcessor.from_pretrained(folder), AutoModelForImageTextToText.from_pretrained(folder)
    asked = (
        f"<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{question}<|im_end|>\n<|im_start|>assistant\n"
    )
    with torch.no_grad():
        output = model(**processor(text=[asked], images=[to_pil_image(image)], return_tensors="pt"))
    return output.logits[0, -1, [processor.tokenizer.convert_tokens_to_ids(word) for word in words]]


def test_a_grade_is_the_mean_over_the_probabilities_of_its_answers(folder, images):
    asked = {"template": "How good is {prompt}, from {low} to {high}?", "style": "qwen_vl"}
    found = load("judge_local", folder, **asked)(images, PROMPTS, {}).tolist()
    for image, prompt, grade in zip(images, PROMPTS, found, strict=True):
        question = f"How good is {prompt}, from 1 to 5?Answer with one of these: 1, 2, 3, 4, 5, and nothing else."
        chances = logits_of(folder, image, question).softmax(0)
        assert grade == pytest.approx((chances @ torch.arange(1.0, 6.0) - 1).item() / 4, abs=1e-4)


def test_unified_reward_reads_what_the_model_writes(folder, images):
    asked = {"template": "Text Caption: [{prompt}]", "max_tokens": 1}
    found = load("unified_reward_local", folder, **asked)(images, PROMPTS, {}).tolist()
    for image, prompt, grade in zip(images, PROMPTS, found, strict=True):
        question = f"Text Caption: [{prompt}]End with a line 'Final Score: X', where X is 1 to 5."
        assert grade == logits_of(folder, image, question).argmax().item() / 4


def test_unified_reward_asks_its_own_question(folder, images, monkeypatch):
    """By its dotted path, too; a served `unified_reward` takes the style of the same name."""
    reward = rewards.load(
        "rewards.models.vision_language.local_judge:UnifiedRewardLocal", options={"path": str(folder)}
    )
    asked = []
    monkeypatch.setattr(reward.function, "score_batches", lambda questions: asked.extend(questions) or torch.ones(2))
    reward(images, PROMPTS, {})
    words = ["".join(part.get("text", "") for part in question) for question in asked]
    assert [word.startswith(f"Text Caption: [{prompt}]") for word, prompt in zip(words, PROMPTS, strict=True)] == [
        True,
        True,
    ]
    assert BUILT_IN["unified_reward"].options["style"] == reward.function.default_style


def test_words_that_are_no_answer_do_not_apply(folder, images):
    for name, options in (("unified_reward_local", {"max_tokens": 3}), ("judge_local", {})):
        assert load(name, folder, words=["x"], **options)(images, PROMPTS, {}).isnan().all()


def test_a_video_is_graded_by_the_mean_of_its_questions(folder):
    videos = torch.rand(2, 5, 3, 40, 40, generator=torch.Generator().manual_seed(1))
    both = load("judge_local", folder, style="video_align_style", frames=2, batch_size=4)(videos, PROMPTS, {})
    alone = [
        load("judge_local", folder, style="video_align_style", frames=2)(
            videos[i : i + 1], PROMPTS[i : i + 1], {}
        ).item()
        for i in (0, 1)
    ]
    assert both.tolist() == pytest.approx(alone, abs=1e-5)
    assert not math.isclose(alone[0], alone[1], abs_tol=1e-4)


@pytest.mark.parametrize(("options", "said"), [
    ({"method": "guided"}, "method: there is no 'guided', choose one of logprobs, text"),
    ({"style": "qwen"}, "style: there is no 'qwen', did you mean 'qwen_vl'"),
    ({"scale": [0, 10]}, "'1' begins '10'; take text"),
])  # fmt: skip
def test_an_option_that_does_not_fit_is_refused(options, said):
    with pytest.raises(RewardError, match=said):
        rewards.load("judge_local", options=options)
