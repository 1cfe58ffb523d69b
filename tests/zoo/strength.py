"""Tiny pipelines that cut their schedule by `strength`: from a noised picture, and of a mask from the noised rest of one."""

from __future__ import annotations

from functools import partial

from diffusers import (
    ChromaImg2ImgPipeline,
    DiffusionPipeline,
    Flux2KleinInpaintPipeline,
    FluxControlImg2ImgPipeline,
    FluxControlNetImg2ImgPipeline,
    FluxInpaintPipeline,
    StableDiffusion3InpaintPipeline,
    ZImageInpaintPipeline,
)

from zoo import flux, inpaint
from zoo.base import Specimen, seeded

LATER = {"strength": 0.6}
CUT = {**inpaint.OFF, **LATER}
SCENE, CONTROL = inpaint.SCENE, inpaint.CONTROL
PICTURE = {"image": SCENE["image"]}


def of_components(kind: type[DiffusionPipeline], build) -> DiffusionPipeline:
    """A pipeline of what another one is made of."""
    return kind(**build().components)


def made(build, task: str, call: dict, columns: dict) -> Specimen:
    """A specimen of this family."""
    return Specimen(build=seeded(build), task=task, call=call, columns=columns)


EDIT, PAINT = "image-editing", "inpainting"
SPECIMENS: dict[str, Specimen] = {
    "ChromaImg2ImgPipeline": made(
        partial(of_components, ChromaImg2ImgPipeline, inpaint.chroma), EDIT, {**inpaint.GUIDED, **LATER}, PICTURE
    ),
    "FluxControlImg2ImgPipeline": made(
        partial(inpaint.flux, FluxControlImg2ImgPipeline, inputs=2), EDIT, CUT, {**PICTURE, **CONTROL}
    ),
    "FluxControlNetImg2ImgPipeline": made(
        partial(of_components, FluxControlNetImg2ImgPipeline, inpaint.flux_controlnet),
        EDIT,
        CUT,
        {**PICTURE, **CONTROL},
    ),
    "FluxInpaintPipeline (from a picture)": made(partial(inpaint.flux, FluxInpaintPipeline), PAINT, CUT, SCENE),
    "Flux2KleinInpaintPipeline": made(
        partial(flux.flux2_klein, Flux2KleinInpaintPipeline), PAINT, {**flux.GUIDED, **flux.LAYERS, **LATER}, SCENE
    ),
    "StableDiffusion3InpaintPipeline (from a picture)": made(
        partial(inpaint.sd3, StableDiffusion3InpaintPipeline), PAINT, {**inpaint.GUIDED, **LATER}, SCENE
    ),
    "ZImageInpaintPipeline (from a picture)": made(
        partial(inpaint.z_image, ZImageInpaintPipeline),
        PAINT,
        {**inpaint.LONG, "guidance_scale": 1.0, **LATER},
        SCENE,
    ),
}
