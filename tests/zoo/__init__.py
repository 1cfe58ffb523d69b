"""Tiny real pipelines of every flow pipeline class, with random weights, built from configs alone; no network.

`SPECIMENS` maps a name to its `Specimen`; the name is that of the class, with a variant in brackets where a class has more
than one.
"""

from pathlib import Path

import torch

from rewards.audio import tensors
from zoo.base import Specimen, load_specimens

SPECIMENS: dict[str, Specimen] = {
    name: specimen
    for file in sorted(Path(__file__).parent.glob("*.yaml"))
    for name, specimen in load_specimens(file).items()
}

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


def numbers(samples):
    """All numbers (B, N) of samples, of videos with sound those of frames and soundtracks."""
    return torch.cat([part.flatten(1) for part in tensors(samples)], 1)
