import open_clip
import pytest
import tiny_rewards
import torch
from torchvision.transforms.functional import to_pil_image

import rewards
from rewards import RewardError

PROMPTS = ["a red circle", "two dogs bark", "", "a red circle " * 50]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("openclip")
    tiny_rewards.options("aesthetic", folder)
    return folder


@pytest.fixture(scope="module")
def clip(folder):
    """The tiny CLIP, made by open_clip, whose preprocessing fits the whole picture."""
    model, _, transform = open_clip.create_model_and_transforms(
        "tiny-open-clip", pretrained=str(folder / "HPS_v2.1_compressed.pt"), image_resize_mode="longest"
    )
    return model.eval(), transform


@pytest.mark.parametrize(("size", "rounding"), [((32, 32), 1e-5), ((48, 30), 1e-3), ((20, 64), 1e-3)])
def test_hpsv2_is_the_cosine_that_open_clip_gives(folder, clip, size, rounding):
    images = torch.rand(4, 3, *size, generator=torch.Generator().manual_seed(0)).mul(255).round() / 255
    model, transform = clip
    with torch.no_grad():
        seen, read, _ = model(
            torch.stack([transform(to_pil_image(image)) for image in images]),
            open_clip.get_tokenizer("tiny-open-clip")(PROMPTS),
        )
    reward = rewards.load("hpsv2", options={"path": str(folder), "architecture": "tiny-open-clip"})
    torch.testing.assert_close(reward(images, PROMPTS, {}).float(), (seen * read).sum(1), atol=rounding, rtol=0)
    own, products = reward.function.features(images, PROMPTS).chunk(2, dim=1)
    torch.testing.assert_close(own, seen, atol=rounding, rtol=0)
    torch.testing.assert_close(products, seen * read, atol=rounding, rtol=0)


def test_aesthetic_is_linear_in_the_direction_of_the_features(folder, clip):
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0)).mul(255).round() / 255
    model, transform = clip
    with torch.no_grad():
        features = model.encode_image(torch.stack([transform(to_pil_image(image)) for image in images])).double()
    weights = {k: v.double() for k, v in torch.load(folder / "aesthetic-model.pth").items()}
    slope, offset = torch.eye(16, dtype=torch.float64), torch.zeros(16, dtype=torch.float64)
    for layer in (0, 2, 4, 6, 7):
        matrix = weights[f"layers.{layer}.weight"]
        slope, offset = matrix @ slope, matrix @ offset + weights[f"layers.{layer}.bias"]
    expected = (features / features.norm(dim=1, keepdim=True)) @ slope[0] + offset
    options = {"path": str(folder), "architecture": "tiny-open-clip", "clip": str(folder / "HPS_v2.1_compressed.pt")}
    found = rewards.load("aesthetic", options=options)(images, ["", "", ""], {})
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "options", "said"), [
    ("hpsv2", {"version": "v3"}, "there is no version 'v3', choose one of v2.0, v2.1"),
    ("hpsv2", {"architecture": "ViT-Q-14"}, "could not be loaded .*'ViT-Q-14' not found in built-ins"),
    ("hpsv2", {"path": "aesthetic-model.pth"}, "could not be loaded .*loading state_dict for CLIP"),
    ("aesthetic", {"path": "HPS_v2.1_compressed.pt"}, r"could not be loaded .*none of its weights is named layers\.\*"),
    ("aesthetic", {"clip": "openai", "architecture": "ViT-B-32-quickgelu"}, "openai could not be loaded from the model hub"),
    ("aesthetic", {"path": "head.pth"}, r"head\.pth reads 24 features, but tiny-open-clip gives 16$"),
])  # fmt: skip
def test_what_does_not_fit_is_one_sentence(name, options, said, folder, monkeypatch):
    monkeypatch.chdir(folder)
    torch.save(tiny_rewards.drawn(tiny_rewards.head_shapes("layers.", 24)), "head.pth")
    if name == "aesthetic":
        options = {"clip": "HPS_v2.1_compressed.pt", **options}
    options = {"path": str(folder), "architecture": "tiny-open-clip", **options}
    with pytest.raises(RewardError, match=rf"{name}: [^\n]*{said}[^\n]*$"):
        rewards.load(name, options=options).function.to("cpu")
