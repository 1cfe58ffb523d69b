from itertools import combinations

import pytest
import tiny_rewards
import torch
from torchvision.transforms.functional import to_pil_image

import rewards
from rewards import RewardError


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        "dino": tiny_rewards.save_dino(tmp_path_factory.mktemp("dino")),
        "clip": tiny_rewards.save_clip(tmp_path_factory.mktemp("clip")),
    }


@pytest.fixture(params=["dino", "clip"])
def options(request, folders):
    return {"path": str(folders[request.param])}


@pytest.fixture
def images():
    images = torch.rand(4, 3, 40, 60, generator=torch.Generator().manual_seed(0))
    images[1], images[2] = 0.9, torch.linspace(0, 1, 60)
    return images


def saved(images, folder):
    files = [str(folder / f"{i}.png") for i in range(len(images))]
    for image, file in zip(images, files, strict=True):
        to_pil_image(image.mul(255).round().byte()).save(file)
    return files


def test_a_picture_is_like_itself_and_likeness_is_mutual(options, images, tmp_path):
    files = saved(images, tmp_path)
    reward = rewards.load("image_similarity", options=options)
    matrix = torch.stack([reward(images, [""] * 4, {"image": [file] * 4}) for file in files])
    assert matrix.diagonal().tolist() == pytest.approx([1] * 4, abs=1e-5)
    torch.testing.assert_close(matrix, matrix.T, atol=1e-5, rtol=0)
    assert matrix.max() <= 1 + 1e-5
    assert matrix[0, 1] < 0.999


def test_a_reference_may_have_another_size_column_and_channels(options, images, tmp_path):
    to_pil_image(torch.full((1, 17, 23), 0.9)).save(tmp_path / "grey.png")
    reward = rewards.load("image_similarity", options={**options, "column": "target"})
    value = reward(images[1:2], ["a"], {"target": [str(tmp_path / "grey.png")], "image": ["unused.png"]})
    assert value.item() == pytest.approx(1, abs=1e-4)  # both are one flat grey


def test_a_row_without_a_reference_is_not_applicable(options, images, tmp_path):
    files = saved(images, tmp_path)
    reward = rewards.load("image_similarity", options=options)
    values = reward(images, [""] * 4, {"image": [None, files[1], None, files[3]]})
    assert values.isnan().tolist() == [True, False, True, False]
    assert values[[1, 3]].tolist() == pytest.approx([1, 1], abs=1e-5)
    assert reward(images, [""] * 4, {"image": [None] * 4}).isnan().all()


@pytest.mark.parametrize(("columns", "said"), [
    ({}, "needs the column 'image' in the prompt file, the reference picture's file; there is none"),
    ({"picture": ["a"] * 4}, "the reference picture's file; there are picture"),
    ({"image": ["no.png"] * 4}, "the reference no.png is not a picture that can be read"),
    ({"image": [["a.png", "b.png"]] * 4}, r"must name one file, not be \['a.png', 'b.png'\]"),
])  # fmt: skip
def test_a_reference_that_cannot_be_used_is_explained(folders, images, columns, said):
    reward = rewards.load("image_similarity", options={"path": str(folders["dino"])})
    with pytest.raises(RewardError, match=f"image_similarity.*{said}"):
        reward(images, [""] * 4, columns)


def test_the_credits_of_a_group_average_to_the_mean_distance_of_its_pairs(options, images, tmp_path):
    files = saved(images, tmp_path)
    similarity = rewards.load("image_similarity", options=options)
    pairs = [1 - similarity(images[[i]], [""], {"image": [files[j]]}).item() for i, j in combinations(range(4), 2)]
    reward = rewards.load("diversity", options=options)
    assert reward.group_wise
    assert reward(images, [""] * 4, {}).mean().item() == pytest.approx(sum(pairs) / 6, abs=1e-5)


def test_the_odd_one_out_earns_most_and_equal_pictures_nothing(options, images):
    reward = rewards.load("diversity", options=options)
    assert reward(images[:1].expand(5, -1, -1, -1), [""] * 5, {}).tolist() == pytest.approx([0] * 5, abs=1e-5)
    assert reward(images[:1], ["a"], {}).isnan().all()  # alone it has none
    values = reward(images[[0, 0, 2, 0]], [""] * 4, {})
    assert values.argmax() == 2
    assert values[2].item() == pytest.approx(3 * values[0].item(), rel=1e-3)  # 3 distances of 3, the others 1 of 3
