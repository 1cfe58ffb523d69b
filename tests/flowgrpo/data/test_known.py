"""Configs that are known here, beside the numbers of parameters that are published."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from flowgrpo import config
from flowgrpo.data import configs, known
from flowgrpo.flow.pipeline.call_arguments import check_call, outline
from flowgrpo.flow.pipeline.loading import load, meta_pipeline
from flowgrpo.mdlm.models import architectures
from flowgrpo.training.weights import trained_weights

# Billions of parameters of the trained networks, of torch's own count of the hub's configs.
SIZES = {
    "black-forest-labs/FLUX.1-dev": 11.90,
    "stabilityai/stable-diffusion-3.5-medium": 2.24,
    "stabilityai/stable-diffusion-3.5-large": 8.06,
    "Qwen/Qwen-Image": 20.43,
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": 1.42,
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": 14.29,
    "black-forest-labs/FLUX.2-dev": 32.22,
    "black-forest-labs/FLUX.2-klein-base-4B": 3.88,
    "black-forest-labs/FLUX.2-klein-4B": 3.88,
    "black-forest-labs/FLUX.2-klein-base-9B": 9.08,
    "Tongyi-MAI/Z-Image": 6.15,
    "Tongyi-MAI/Z-Image-Turbo": 6.15,
    "Qwen/Qwen-Image-Edit-2511": 20.43,
    "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers": 1.60,
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": 14.29,  # each of two
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": 5.00,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": 8.33,
    "Lightricks/LTX-2": 18.88,
    "stable-audio-3-medium-base": 1.45,
}
TEXTS = {
    "GSAI-ML/LLaDA-8B-Instruct": 8.0,
    "GSAI-ML/LLaDA-1.5": 8.0,
    "Dream-org/Dream-v0-Instruct-7B": 7.6,
    "inclusionAI/LLaDA2.0-mini": 16.26,
}


@pytest.fixture(scope="module")
def written():
    """All built-in configs."""
    return [config.load(name) for name in configs.names()]


# Of the same network as others, in another size or for other inputs.
FURTHER = (
    "Wan-AI/Wan2.1-T2V-14B-Diffusers",
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    "black-forest-labs/FLUX.2-klein-4B",
    "stabilityai/stable-diffusion-3.5-large",
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.zoo] * (n in FURTHER)) for n in known.models()])
def test_a_known_pipeline_has_the_size_that_is_published_and_what_its_configs_name(name, written):
    with known.folder(name, with_tokenizers=False) as place:
        index = json.loads((Path(place) / "model_index.json").read_text())
        kind = load.component_class(index["transformer"])
        network = meta_pipeline.network(kind, Path(place) / "transformer", torch.bfloat16)
    billions = sum(p.numel() for p in network.parameters()) / 1e9
    assert billions == pytest.approx(SIZES[name], abs=0.006)
    for one in (each for each in written if each.model.path == name):
        assert trained_weights.lora_config(1, 1, one.model.lora.targets, {"transformer": network}).target_modules
        for call in (one.model.call, one.eval.call):
            assert check_call(outline(index["_class_name"]), call) == call


@pytest.mark.parametrize("name", known.texts())
def test_a_known_language_model_has_the_size_that_is_published(name):
    with known.text_folder(name) as place:
        shapes = architectures.shapes(name, place)
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) / 1e9 == pytest.approx(TEXTS[name], abs=0.06)


def test_every_model_of_a_built_in_config_is_known(written):
    assert {one.model.path for one in written} <= {*known.models(), *known.texts()}


def test_a_known_tokenizer_counts_as_many_tokens_as_letters_allow():
    with known.folder("black-forest-labs/FLUX.1-dev") as place:
        tokenizer = AutoTokenizer.from_pretrained(Path(place) / "tokenizer_2")
    assert len(tokenizer("a cat").input_ids) == 2
    assert tokenizer("a cat", padding="max_length", return_tensors="pt").input_ids.shape == (1, 512)
    assert tokenizer("a" * 3000, truncation=True).input_ids == [2] * 512
