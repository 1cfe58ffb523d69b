"""Names of layers elsewhere, against those recorded from ComfyUI's and diffusers' own code; and layouts of trainers."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from fuzzing import loras
from safetensors.torch import save_file
from zoo import SPECIMENS

from flowgrpo.errors import InputError
from flowgrpo.flow.config import Model
from flowgrpo.flow.model import initial_lora
from flowgrpo.flow.model.layer_names import NAMES

RECORDED = json.loads((Path(__file__).parents[3] / "data" / "comfyui_names.json").read_text())


@pytest.mark.parametrize("kind", sorted(RECORDED))
def test_every_recorded_name_means_the_layers_that_it_was_recorded_with(kind):
    layers = RECORDED[kind]["layers"]
    found = NAMES[kind].read_layers([part for parts in layers.values() for part in parts])
    # Two embedders of HunyuanVideo were recorded under names that are in no network of diffusers.
    known = {name: tuple(parts) for name, parts in layers.items() if not re.match(r"txt_in\.[tc]_embedder", name)}
    assert {name: found.get(name, (name,)) for name in known} == known


@pytest.mark.parametrize("layout", sorted(loras.LAYOUTS))
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "WanPipeline" else pytest.mark.zoo) for n in sorted(loras.PIPELINES)]
)
def test_a_layout_with_every_shift_and_bias_is_read_whole(name, layout):
    shifts = [("shift", i) for i in range(len(loras.PIPELINES[name]))]
    assert loras.attempt((name, layout, (*shifts, ("bias", 1), ("zeros", 0)))) is None


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
    """The folder of a tiny Wan, its network, and a file's tensors for two layers of it under the makers' names."""
    folder = tmp_path_factory.mktemp("wan")
    pipe = SPECIMENS["WanPipeline"].build()
    pipe.save_pretrained(folder)
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name in ("blocks.0.self_attn.q", "blocks.1.cross_attn.o"):
        tensors[f"{name}.lora_down.weight"] = torch.randn(2, 32, generator=generator)
        tensors[f"{name}.lora_up.weight"] = torch.randn(32, 2, generator=generator)
    return folder, pipe.transformer, tensors


def read(wan, tmp_path, tensors):
    save_file(tensors, tmp_path / "a.safetensors")
    (found,) = initial_lora.adapters(Model(path=str(wan[0]), lora={"path": str(tmp_path / "a.safetensors")})).values()
    return found


def test_the_sentence_names_the_key_that_has_no_place(wan, tmp_path):
    tensors = {f"diffusion_model.{key}": tensor for key, tensor in wan[2].items()}
    for key in list(tensors):
        if "self_attn" in key:
            tensors[key.replace("self_attn", "third_attn")] = tensors[key].clone()
    with pytest.raises(
        InputError, match=r"an adapter for diffusion_model\.blocks\.0\.third_attn\.q, and .* no such layer"
    ):
        read(wan, tmp_path, tensors)


def test_shifts_and_biases_change_the_sample_as_in_a_network_with_these_numbers(wan, tmp_path):
    _, network, tensors = wan
    generator = torch.Generator().manual_seed(1)
    more = {
        "blocks.0.norm3.diff": torch.randn(32, generator=generator),
        "blocks.1.diff_m": torch.randn(1, 6, 32, generator=generator),
        "blocks.0.self_attn.q.diff_b": torch.randn(32, generator=generator),
        "blocks.0.ffn.2.diff_b": torch.randn(32, generator=generator),
    }
    found, expected = copy.deepcopy(network), copy.deepcopy(network)
    read(wan, tmp_path, {f"diffusion_model.{key}": t for key, t in (tensors | more).items()}).inject(found)
    with torch.no_grad():
        first, second = expected.blocks
        first.norm2.weight += more["blocks.0.norm3.diff"]
        second.scale_shift_table += more["blocks.1.diff_m"]
        first.attn1.to_q.bias += more["blocks.0.self_attn.q.diff_b"]
        first.ffn.net[2].bias += more["blocks.0.ffn.2.diff_b"]
        for layer, name in (
            (first.attn1.to_q, "blocks.0.self_attn.q"),
            (second.attn2.to_out[0], "blocks.1.cross_attn.o"),
        ):
            layer.weight += tensors[f"{name}.lora_up.weight"] @ tensors[f"{name}.lora_down.weight"]  # alpha is the rank
    given = {
        "hidden_states": torch.randn(1, 4, 1, 4, 4, generator=generator),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, 3, 32, generator=generator),
    }
    with torch.no_grad():
        torch.testing.assert_close(found(**given).sample, expected(**given).sample, atol=1e-5, rtol=1e-4)
        assert not torch.allclose(found(**given).sample, network(**given).sample, atol=1e-3)


class Dropping:
    """A pipeline's class whose translation of names leaves out what it does not know, as some of diffusers' do."""

    @staticmethod
    def lora_state_dict(tensors):
        return {key.replace("theirs.", "transformer.blocks."): t for key, t in tensors.items() if "k_img" not in key}


def test_a_translation_that_leaves_a_tensor_out_is_refused_by_the_tensor_s_name(wan, tmp_path, monkeypatch):
    monkeypatch.setattr(initial_lora.load, "pipeline_class", lambda path: Dropping)
    tensors = {
        "theirs.0.attn1.to_q.lora_A.weight": torch.ones(2, 32),
        "theirs.0.attn1.to_q.lora_B.weight": torch.ones(32, 2),
    }
    assert list(read(wan, tmp_path, tensors).layers) == ["blocks.0.attn1.to_q"]
    more = {key.replace("to_q", "k_img"): tensor.clone() for key, tensor in tensors.items()}
    with pytest.raises(
        InputError, match=r"holds theirs\.0\.attn1\.k_img\.lora_A\.weight, which diffusers' translation"
    ):
        read(wan, tmp_path, tensors | more)
