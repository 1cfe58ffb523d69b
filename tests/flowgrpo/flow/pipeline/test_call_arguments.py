"""What is read of a pipeline's call from its source is what the imported class says."""

import inspect
import json
from pathlib import Path

import diffusers
import pytest

import flowgrpo
from flowgrpo.flow.pipeline import guidance
from flowgrpo.flow.pipeline.call_arguments import outline, unguided

CERTIFIED = json.loads((Path(flowgrpo.__file__).parent / "data" / "models.json").read_text())
NAMES = sorted({row["class"] for row in CERTIFIED})
CALLS = ({}, {"guidance_scale": 1.0}, {"guidance_scale": 5.0}, {"true_cfg_scale": 4.0, "negative_prompt": "a tree"})


def takes(pipeline):
    parameters = inspect.signature(inspect.unwrap(pipeline.__call__)).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters]


@pytest.mark.parametrize("name", ["FluxPipeline", "SanaPipeline", "StableDiffusion3Pipeline", "WanPipeline"])
def test_an_outline_says_what_the_class_says(name):
    found, pipeline = outline(name), getattr(diffusers, name)
    assert found.__name__ == name
    assert found is not pipeline
    assert takes(found) == takes(pipeline)
    for call in CALLS:
        assert guidance.guidance_branches(found, call) == guidance.guidance_branches(pipeline, call)
    assert unguided(found) == unguided(pipeline)
    assert hasattr(found, "encode_prompt") == hasattr(pipeline, "encode_prompt")


def test_most_pipelines_have_an_outline():
    assert sum(outline(name) is not None for name in NAMES[::3]) > 0.9 * len(NAMES[::3])


@pytest.mark.parametrize("name", ["NoSuchPipeline", "FluxKontextPipeline", "HunyuanVideoPipeline"])
def test_where_the_source_does_not_tell_there_is_none(name):
    """FluxKontext's call has a default that is computed, HunyuanVideo's one that has a name."""
    assert outline(name) is None
