"""Tiny real pipelines of every flow pipeline class, with random weights, built from configs alone; no network.

`SPECIMENS` maps a name to its `Specimen`; the name is that of the class, with a variant in brackets where a class has more
than one.
"""

from zoo import audio, flux, image, inpaint, qwen, strength, video, wan
from zoo.base import Specimen

FAMILIES = (flux, qwen, image, wan, video, audio, inpaint, strength)
SPECIMENS: dict[str, Specimen] = {name: specimen for family in FAMILIES for name, specimen in family.SPECIMENS.items()}

# What every test run certifies: each family, each modality, each way of walking in slices, each trait.
REPRESENTATIVE = (
    "AceStepPipeline (turbo)",
    "ChromaPipeline",
    "Cosmos2_5_PredictBasePipeline",
    "Flux2KleinPipeline",
    "FluxControlPipeline",
    "FluxImg2ImgPipeline",
    "FluxInpaintPipeline (from a picture)",
    "FluxPipeline",
    "HiDreamImagePipeline",
    "Kandinsky5I2IPipeline",
    "LTX2Pipeline",
    "LTXImageToVideoPipeline",
    "Lumina2Pipeline",
    "MochiPipeline",
    "OmniGenPipeline",
    "PRXPixelPipeline",
    "QwenImage21Pipeline",
    "QwenImagePipeline",
    "SanaPipeline",
    "StableAudio3Pipeline",
    "StableDiffusion3Pipeline",
    "WanPipeline (2.2)",
    "ZImagePipeline",
)
