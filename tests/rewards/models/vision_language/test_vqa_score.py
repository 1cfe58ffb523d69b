import pytest
import tiny_asked as tiny
import torch
from torchvision.transforms.functional import to_pil_image
from transformers import AutoModelForImageTextToText, AutoProcessor

import rewards
from rewards import RewardError
from rewards.served.grading import pictures, text

PROMPTS = ["a red circle", "", "two dogs", "{a} blue square of two dogs, and a long word or two more: red circles", "x"]
SIZES = [(64, 96), (40, 56), (30, 90), (112, 56), (65, 63)]


@pytest.fixture(scope="module", params=list(tiny.KINDS))
def folder(request, tmp_path_factory):
    return tiny.save_qwen(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def samples():
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(3, *size, generator=generator).mul(255).round() / 255 for size in SIZES]


def load(folder, **options):
    return rewards.load("vqa_score", options={"path": str(folder), "dtype": "float32", **options})


def released(folder, image, prompt):
    """The probability of Yes as t2v_metrics has it: of the first token that `generate` gives for one picture."""
    processor, model = AutoProcessor.from_pretrained(folder), AutoModelForImageTextToText.from_pretrained(folder)
    question = f'Does this figure show "{prompt}"? Please answer Yes or No.'
    asked = (
        f"<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{question}<|im_end|>\n<|im_start|>assistant\n"
    )
    inputs = processor(text=[asked], images=[to_pil_image(image)], return_tensors="pt")
    kept = {"output_scores": True, "return_dict_in_generate": True}
    answered = model.generate(**inputs, max_new_tokens=1, do_sample=False, **kept)
    return answered.scores[0][0].softmax(0)[processor.tokenizer.convert_tokens_to_ids("Yes")].item()


def test_the_score_is_the_probability_of_yes(folder, samples):
    reward = load(folder)
    for image, prompt in [*zip(samples, PROMPTS, strict=True)][:2]:
        assert reward(image[None], [prompt], {}).item() == pytest.approx(released(folder, image, prompt), abs=1e-5)


def test_pictures_and_questions_of_different_sizes_do_not_change_each_other(folder, samples):
    reward = load(folder).function
    questions = [[*pictures(image, 1), text(prompt)] for image, prompt in zip(samples, PROMPTS, strict=True)]
    with torch.no_grad():
        together = reward.next_logits(questions)
        alone = torch.cat([reward.next_logits([question]) for question in questions])
        torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)
        answers = reward.answer(questions, max_tokens=4)
        assert answers == [reward.answer([question], max_tokens=4)[0] for question in questions]
        assert len(set(answers)) > 1
        torch.testing.assert_close(reward.next_logits(questions), together)  # an answer before leaves no trace


def test_a_batch_is_of_bfloat16_unless_told_otherwise(folder):
    reward = rewards.load("vqa_score", options={"path": str(folder)}).function
    assert {parameter.dtype for parameter in reward.model.parameters()} == {torch.bfloat16}


def test_thinking_is_off_where_the_template_knows_it(tmp_path, samples):
    chat = tiny.CHAT.replace("assistant\n", "assistant\n{% if enable_thinking is not false %}<think>{% endif %}")
    plain, thoughtful = (load(tiny.save_qwen(tmp_path / str(i), chat=it)) for i, it in enumerate((tiny.CHAT, chat)))
    assert torch.equal(plain(samples[0][None], ["a"], {}), thoughtful(samples[0][None], ["a"], {}))


def test_a_model_that_is_not_instructed_is_refused(tmp_path):
    tiny.save_qwen(tmp_path, chat=None)
    with pytest.raises(
        RewardError, match=rf"^vqa_score: {tmp_path} has no chat template, take a model that is instructed$"
    ):
        load(tmp_path).function.to("cpu")
