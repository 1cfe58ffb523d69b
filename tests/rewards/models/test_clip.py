import pytest
import tiny_rewards
import torch
from torchvision.transforms.functional import to_pil_image
from transformers import AutoTokenizer, CLIPModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

import rewards
from rewards.models.model import encode_unique

PROMPTS = ["a red circle", "two dog", "a", "a blue square"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_rewards.save_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def logits(folder):
    """What transformers' own processor and model make of all pictures and prompts, and exp(logit_scale)."""
    images = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(1)).mul(255).round() / 255
    images[3] = 0
    pixels = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})(
        [to_pil_image(image) for image in images], return_tensors="pt"
    )
    tokens = AutoTokenizer.from_pretrained(folder)(PROMPTS, padding="max_length", max_length=8, return_tensors="pt")
    model = CLIPModel.from_pretrained(folder).eval()
    output = model(**{name: {**tokens, **pixels}[name] for name in ("input_ids", "attention_mask", "pixel_values")})
    return images, output.logits_per_image.detach(), model.logit_scale.exp().item()


def test_pickscore_is_the_logit_of_each_picture_with_its_prompt(folder, logits):
    images, expected, _ = logits
    found = rewards.load("pickscore", options={"path": str(folder)})(images, PROMPTS, {})
    torch.testing.assert_close(found.float(), expected.diagonal(), atol=1e-4, rtol=1e-4)


def test_features_are_directions_whose_products_with_the_prompt_s_sum_to_the_cosine(folder, logits):
    images, expected, scale = logits
    reward = rewards.load("pickscore", options={"path": str(folder), "batch_size": 3}).function
    seen, products = reward.features(images, PROMPTS).chunk(2, dim=1)
    torch.testing.assert_close(seen.norm(dim=1), torch.ones(4))
    torch.testing.assert_close(products.sum(1) * scale, expected.diagonal(), atol=1e-4, rtol=1e-4)


def test_frames_of_a_video_are_scored_as_pictures(folder, logits):
    images, expected, _ = logits
    videos = torch.stack([images, images.flip(0)])
    found = rewards.load("pickscore", options={"path": str(folder)}, frames=2)(videos, PROMPTS[:2], {})
    first, second = expected[:, 0], expected[:, 1]  # of all pictures with either prompt
    ends = torch.stack([(first[0] + first[3]) / 2, (second[3] + second[0]) / 2])
    torch.testing.assert_close(found.float(), ends, atol=1e-4, rtol=1e-4)


def test_clip_score_is_two_and_a_half_cosines_or_nothing(folder, logits):
    images, expected, scale = logits
    reward = rewards.load("clip_score", options={"path": str(folder)})
    cosines = expected / scale
    assert (cosines > 0.01).any()
    assert (cosines < -0.01).any()
    for prompt, row in zip(PROMPTS, cosines.T, strict=True):
        found = reward(images, [prompt] * 4, {}).float()
        torch.testing.assert_close(found, 2.5 * row.clamp(min=0), atol=1e-5, rtol=1e-4)


def test_a_prompt_is_cut_at_the_length_that_the_model_reads(folder):
    reward = rewards.load("pickscore", options={"path": str(folder)})
    image = torch.rand(1, 3, 32, 32)
    long, cut, other = "two dog of a red circle of blue square", "two dog of a red circle", "two dog of a red"
    values = [reward(image, [prompt], {}).item() for prompt in (long, cut, other)]
    assert values[0] == pytest.approx(values[1])
    assert values[1] != pytest.approx(values[2])


def test_a_prompt_is_read_once_however_many_pictures_it_has():
    read = []
    features = encode_unique(lambda texts: read.append(texts) or torch.arange(len(texts)), ["b", "a", "b", "b"])
    assert (read, features.tolist()) == ([["b", "a"]], [0, 1, 0, 0])
