import open_clip
import pytest
import torch
from torchvision.transforms.functional import to_pil_image
from transformers import BitImageProcessor, CLIPImageProcessor, SiglipImageProcessor
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from rewards.models.preprocessing import Preprocessing, of_open_clip, of_transformers

SIZES = [(40, 56), (101, 60), (20, 20), (150, 200), (32, 32)]
PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


def pictures(size):
    """Noise, whose bicubic overshoot is large, and colours that change slowly."""
    generator = torch.Generator().manual_seed(0)
    smooth = torch.nn.functional.interpolate(torch.rand(1, 3, 5, 5, generator=generator), size, mode="bilinear")
    return torch.cat([torch.rand(1, 3, *size, generator=generator), smooth])


def by_pil(images):
    return [to_pil_image(image.mul(255).round().byte()) for image in images]


def assert_same_but_for_rounding(found, expected, std):
    levels = (found - expected).abs() * 255 * torch.tensor(std)[:, None, None]
    assert levels.max() < 2.1
    assert levels.mean() < 0.2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("processor", "original", "options"), [
    (CLIPImageProcessor, CLIPImageProcessorPil, {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}),
    (BitImageProcessor, BitImageProcessorPil, {"size": {"shortest_edge": 32}, "crop_size": {"height": 28, "width": 28}}),
    (SiglipImageProcessor, SiglipImageProcessorPil, {"size": {"height": 32, "width": 24}}),
])  # fmt: skip
def test_pictures_become_what_transformers_makes_of_their_files(processor, original, options, size):
    images = pictures(size)
    expected = original(**options)(by_pil(images), return_tensors="pt")["pixel_values"]
    found = of_transformers(processor(**options))(images)
    assert_same_but_for_rounding(found, expected, processor(**options).image_std)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", ["shortest", "longest", "squash"])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_pictures_become_what_open_clip_makes_of_their_files(mode, interpolation, size):
    config = open_clip.transform.PreprocessCfg(size=32, resize_mode=mode, interpolation=interpolation)
    images = pictures(size)
    transform = open_clip.transform.image_transform_v2(config, is_train=False)
    expected = torch.stack([transform(picture) for picture in by_pil(images)])
    assert_same_but_for_rounding(of_open_clip(vars(config))(images), expected, config.std)


def test_a_picture_is_the_same_before_and_after_it_is_saved_in_8_bits():
    images = pictures((40, 56))
    see = Preprocessing((32, 32), "cover", (32, 32), **PLAIN)
    assert torch.equal(see(images), see(images.mul(255).round() / 255))
    assert torch.equal(see(images + 3 * (images > 0.999)), see(images))  # beyond white is white


def test_a_processor_of_its_own_way_is_refused():
    processor = CLIPImageProcessor(size={"longest_edge": 64, "shortest_edge": 32})
    with pytest.raises(ValueError, match="CLIPImageProcessor resizes by"):
        of_transformers(processor)
