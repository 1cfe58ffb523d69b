"""Tiny real pipelines of every flow pipeline class, with random weights, built from configs alone; no network.

`SPECIMENS` maps a name to its `Specimen`; the name is that of the class, with a variant in brackets where a class has more
than one.
"""

from zoo import (
    audio,
    cosmos,
    flux,
    hunyuan_image,
    hunyuan_video,
    image,
    image_to_image,
    inpaint,
    ltx,
    qwen,
    qwen_kin,
    sd3,
    strength,
    video,
    wan,
    z_image,
)
from zoo.base import Specimen

FAMILIES = (
    *(flux, sd3, qwen, qwen_kin, z_image, hunyuan_image, image, image_to_image, inpaint),
    *(wan, cosmos, hunyuan_video, ltx, video, audio, strength),
)
SPECIMENS: dict[str, Specimen] = {name: specimen for family in FAMILIES for name, specimen in family.SPECIMENS.items()}

# Each large family, each modality, each way of walking in slices, each trait.
REPRESENTATIVE = (
    "AceStepPipeline (turbo)",
    "FluxControlPipeline",
    "FluxInpaintPipeline (from a picture)",
    "FluxPipeline",
    "HiDreamImagePipeline",
    "LTX2Pipeline",
    "LTXImageToVideoPipeline",
    "MochiPipeline",
    "OmniGenPipeline",
    "PRXPixelPipeline",
    "QwenImagePipeline",
    "SanaPipeline",
    "StableAudio3Pipeline",
    "StableDiffusion3Pipeline",
    "WanPipeline (2.2)",
    "ZImagePipeline",
)
