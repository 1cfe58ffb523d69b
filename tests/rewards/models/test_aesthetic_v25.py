import hashlib
from urllib.error import URLError

import pytest
import tiny_rewards
import torch
from torchvision.transforms.functional import to_pil_image
from transformers import SiglipImageProcessor, SiglipModel

import rewards
from rewards import RewardError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_rewards.save_siglip(tmp_path_factory.mktemp("siglip"))


def load(folder, **options):
    return rewards.load("aesthetic_v25", options={"path": str(folder), "head": str(folder / "head.pth"), **options})


@pytest.mark.parametrize(("size", "rounding"), [((32, 32), 1e-5), ((48, 30), 1e-3)])
def test_the_score_is_linear_in_the_direction_of_the_pooled_features(folder, size, rounding):
    """As the author's code computes it: the head, without its dropout, of features over their norm."""
    images = torch.rand(3, 3, *size, generator=torch.Generator().manual_seed(0)).mul(255).round() / 255
    pixels = SiglipImageProcessor.from_pretrained(folder)(
        [to_pil_image(image) for image in images], return_tensors="pt"
    )
    with torch.no_grad():
        features = SiglipModel.from_pretrained(folder).vision_model(**pixels).pooler_output.double()
    scores = features / features.norm(dim=1, keepdim=True)
    weights = torch.load(folder / "head.pth")
    for layer in (0, 2, 4, 6, 8):
        matrix, offset = (weights[f"scoring_head.{layer}.{part}"].double() for part in ("weight", "bias"))
        scores = scores @ matrix.T + offset
    found = load(folder)(images, ["", "", ""], {})
    torch.testing.assert_close(found, scores[:, 0], atol=rounding, rtol=rounding)


def test_the_head_is_downloaded_once(folder, tmp_path, monkeypatch):
    content = (folder / "head.pth").read_bytes()
    asked = []

    def download(url, place, digest, progress):
        asked.append((url, digest))
        (tmp_path / "checkpoints" / "aesthetic_predictor_v2_5.pth").write_bytes(content)
        assert place == str(tmp_path / "checkpoints" / "aesthetic_predictor_v2_5.pth")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    image = torch.rand(1, 3, 32, 32)
    expected = load(folder)(image, [""], {})
    for _ in range(2):
        assert torch.equal(load(folder, head=None)(image, [""], {}), expected)
    ((url, digest),) = asked
    assert url.endswith("/models/aesthetic_predictor_v2_5.pth")
    assert len(digest) == len(hashlib.sha256().hexdigest())


def test_a_head_that_cannot_be_had_is_one_sentence(folder, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise URLError("no route")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", fail)
    said = r"could not be downloaded from https://github\.com/\S+ \([^\n]*no route[^\n]*\); give its file as `head`$"
    with pytest.raises(RewardError, match=rf"^aesthetic_v25: the head {said}"):
        load(folder, head=None).function.to("cpu")
    with pytest.raises(RewardError, match=r"^aesthetic_v25: there is no file head\.pth, which should hold the head's"):
        load(folder, head="head.pth").function.to("cpu")
    tiny_rewards.save_clip(tmp_path)
    with pytest.raises(RewardError, match=rf"^aesthetic_v25: {tmp_path} holds a model of type clip, not siglip_vision"):
        load(folder, path=str(tmp_path)).function.to("cpu")


@pytest.mark.parametrize(("width", "prefix", "said"), [
    (24, "scoring_head.", r"the head in \S+ reads 24 features, but \S+ gives 16$"),
    (16, "layers.", r"could not be loaded .*none of its weights is named scoring_head\.\*"),
])  # fmt: skip
def test_another_head_is_refused(folder, tmp_path, width, prefix, said):
    torch.save(tiny_rewards.drawn(tiny_rewards.head_shapes(prefix, width, last=8)), tmp_path / "other.pth")
    with pytest.raises(RewardError, match=rf"^aesthetic_v25: [^\n]*{said}"):
        load(folder, head=str(tmp_path / "other.pth")).function.to("cpu")
