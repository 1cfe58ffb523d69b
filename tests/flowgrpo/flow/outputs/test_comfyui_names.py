"""A LoRA under ComfyUI's names: what ComfyUI would merge is what diffusers computes, and other readers take it.

`comfyui_names.json` was recorded from ComfyUI's own `model_lora_keys_unet` on tiny models of its own classes, and, for which
rows of a layer are which layer of diffusers, from diffusers' converters of released checkpoints: for the first block of each
network the layers of diffusers that a layer of ComfyUI holds, in order, and which keys it reads for which of them.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import DiffusionPipeline
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from zoo import SPECIMENS

from flowgrpo.cli import main
from flowgrpo.errors import InputError
from flowgrpo.flow.config import Config
from flowgrpo.flow.outputs import comfyui_names
from flowgrpo.flow.outputs.export import write_weights
from flowgrpo.flow.pipeline.networks import traits
from flowgrpo.training.weights.trained_weights import Weights, lora_config

RECORDED = json.loads((Path(__file__).parents[3] / "data" / "comfyui_names.json").read_text())
PIPELINES = {
    "Flux2Transformer2DModel": "Flux2KleinPipeline",
    "FluxTransformer2DModel": "FluxPipeline",
    "HunyuanVideoTransformer3DModel": "HunyuanVideoPipeline",
    "LTXVideoTransformer3DModel": "LTXPipeline",
    "QwenImageTransformer2DModel": "QwenImagePipeline",
    "SD3Transformer2DModel": "StableDiffusion3Pipeline",
    "WanTransformer3DModel": "WanPipeline",
    "WanVACETransformer3DModel": "WanVACEPipeline",
    "ZImageTransformer2DModel": "ZImagePipeline",
}


def adapted(kind, targets="auto", only=None):
    """Tiny weights of a network with a LoRA of rank 3 that is nowhere zero."""
    networks = traits.networks(SPECIMENS[PIPELINES[kind]].build())
    network = networks["transformer"]
    config = lora_config(3, 4.5, targets, {"transformer": network})
    if only is not None:
        config.target_modules = only
    weights = Weights({"transformer": network}, config)
    torch.manual_seed(1)
    for p in weights.parameters:
        p.data.normal_()
    return network, weights.adapter_state("transformer")


def change(written, key):
    """What ComfyUI adds to the layer of a key: alpha / rank * up @ down, or up @ down where there is no alpha."""
    down, up = ("lora_down", "lora_up") if f"{key}.lora_down.weight" in written else ("lora_A", "lora_B")
    down, up = written[f"{key}.{down}.weight"], written[f"{key}.{up}.weight"]
    alpha = written.get(f"{key}.alpha")
    return (1.0 if alpha is None else alpha.item() / down.shape[0]) * up @ down


def layers_of(written):
    return sorted({re.sub(r"\.(lora_\w+\.weight|alpha)$", "", key) for key in written})


@pytest.mark.parametrize("kind", sorted(RECORDED))
def test_what_comfyui_merges_is_what_diffusers_computes(kind):
    recorded = RECORDED[kind]
    network, state = adapted(kind)
    written = comfyui_names.rename(network, state)
    assert all(f"{key}.alpha" in written for key in layers_of(written))
    found = {}
    for key in layers_of(written):
        if re.search(r"[._][1-9]\d*[._](?!weight)", key.split("attn")[0]):
            continue  # a later block, of which the record has none
        target, part = recorded["reads"][key]
        parts = recorded["layers"][target]
        sizes = [network.get_submodule(path).out_features for path in parts]
        pieces = [change(written, key)] if part is not None else change(written, key).split(sizes)
        found |= dict(zip([parts[part]] if part is not None else parts, pieces, strict=True))
    trained = {path: m for path, m in network.named_modules() if isinstance(m, LoraLayer)}
    assert len(found) >= 4
    for path, layer in trained.items():
        if path in found:
            torch.testing.assert_close(found.pop(path), layer.get_delta_weight("default"), atol=1e-5, rtol=1e-5)
        else:
            assert re.search(r"\.[1-9]\d*\.", path), path
    assert all(not piece.any() for piece in found.values())  # parts of a layer that were not trained


def test_a_layer_in_parts_may_be_trained_in_part():
    network, state = adapted("Flux2Transformer2DModel", only=["to_v", "to_add_out"])
    written = comfyui_names.rename(network, state)
    whole = change(written, "lora_unet_double_blocks_0_img_attn_qkv")
    query, key, value = whole.chunk(3)
    assert not query.any()
    assert not key.any()
    layer = network.get_submodule("transformer_blocks.0.attn.to_v")
    torch.testing.assert_close(value, layer.get_delta_weight("default"))
    assert written["lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight"].shape[0] == 3


@pytest.mark.parametrize("kind", ["SanaTransformer2DModel", "PRXTransformer2DModel"])
def test_an_unknown_network_is_refused_by_name(kind):
    with pytest.raises(InputError, match=rf"^--comfyui: which names ComfyUI has for the layers of {kind} is not known"):
        comfyui_names.names_of(kind)


@pytest.mark.parametrize("kind", ["FluxTransformer2DModel", "SD3Transformer2DModel"])
def test_every_linear_layer_has_a_name(kind):
    network, state = adapted(kind, "all-linear")
    assert len(layers_of(comfyui_names.rename(network, state))) == len(state) // 2


def sampled(folder, call, prompt, lora=None):
    pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    if lora is not None:
        pipe.load_lora_weights(lora)
    call = {**call, "output_type": "pt", "return_dict": False}
    return pipe(prompt=prompt, generator=torch.Generator().manual_seed(5), **call)[0]


def randomised(networks):
    weights = Weights(networks, lora_config(2, 4, "auto", networks))  # a scale of 2, which rounds nothing
    for p in weights.parameters:
        p.data.normal_(std=0.1)
    return weights


# Layers by diffusers' names, in parts of another's layers, and by names of its own.
@pytest.mark.parametrize(
    "name",
    [
        *("FluxPipeline", "Flux2KleinPipeline", "WanPipeline"),
        *(pytest.param(name, marks=pytest.mark.zoo) for name in ("QwenImagePipeline", "ZImagePipeline")),
    ],
)
def test_diffusers_reads_the_file_for_comfyui_to_the_same_sample(name, tmp_path):
    specimen = SPECIMENS[name]
    pipe = specimen.build()
    pipe.save_pretrained(tmp_path / "model")
    weights = randomised(traits.networks(pipe))
    write_weights(SimpleNamespace(pipe=pipe), weights, tmp_path)
    [file] = comfyui_names.write(weights, tmp_path, "t")
    base, own, other = (
        sampled(tmp_path / "model", specimen.call, specimen.prompts[0], lora)
        for lora in (None, tmp_path, tmp_path / file)
    )
    assert not torch.equal(base, own)
    assert torch.equal(own, other)


def test_two_networks_make_two_files(tmp_path):
    weights = randomised(traits.networks(SPECIMENS["WanPipeline (2.2)"].build()))
    files = comfyui_names.write(weights, tmp_path, "t")
    assert files == ["comfyui/t-high_noise.safetensors", "comfyui/t-low_noise.safetensors"]
    for module, file in zip(("transformer", "transformer_2"), files, strict=True):
        adapter = weights.adapter_state(module)["blocks.0.attn1.to_q.lora_B.weight"]
        assert torch.equal(load_file(tmp_path / file)["diffusion_model.blocks.0.self_attn.q.lora_B.weight"], adapter)


def checked(folder, kind, layer, lora):
    """Check a checkpoint in which a layer of a network of a class has an adapter."""
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "X", "transformer": ["diffusers", kind]}))
    save_file({f"{layer}.lora_A.default.weight": torch.zeros(1)}, folder / "weights.safetensors")
    settings = Config.model_validate({"model": {"path": str(folder), "lora": lora}, "rewards": [{"use": "shapes"}]})
    comfyui_names.check(settings, folder, {})


@pytest.mark.parametrize(
    ("kind", "lora", "layer", "words"),
    [
        ("Sana", {}, "transformer_blocks.0.attn1.to_q", "which names ComfyUI has for the layers of Sana"),
        ("Flux", None, "", "this run trained full weights"),
        ("ZImage", {}, "t_embedder.mlp.0", "the layer t_embedder.mlp.0 of ZImageTransformer2DModel has"),
    ],
)
def test_what_has_no_name_is_refused(tmp_path, kind, lora, layer, words):
    with pytest.raises(InputError, match=f"^--comfyui: {words}"):
        checked(tmp_path, f"{kind}Transformer2DModel", f"transformer.{layer}", lora)


@pytest.mark.parametrize("beside", ["", "average.", "reference.", "old.", "bank.3."])
def test_what_a_checkpoint_keeps_of_other_policies_needs_no_name(tmp_path, beside):
    checked(tmp_path, "SD3Transformer2DModel", f"{beside}transformer.transformer_blocks.0.attn.to_q", {})


@pytest.mark.usefixtures("trained")
def test_the_command_writes_the_file_or_refuses_before_it_loads_the_model(capsys, monkeypatch):
    capsys.readouterr()
    assert main(["export", "runs/t", "--out", "out", "--comfyui", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["comfyui"] == ["comfyui/t.safetensors"]
    written, adapter = load_file("out/comfyui/t.safetensors"), load_file("out/pytorch_lora_weights.safetensors")
    assert len(written) == 3 * len(adapter) // 2
    key = "transformer.transformer_blocks.0.attn.to_q.lora_B.weight"
    assert torch.equal(written[key], adapter[key])
    assert adapter[key].any()
    monkeypatch.setattr("flowgrpo.flow.setup.policy_and_weights", lambda *a: pytest.fail("the model was loaded"))
    monkeypatch.delitem(comfyui_names.NAMES, "SD3Transformer2DModel")
    assert main(["export", "runs/t", "--out", "new", "--comfyui"]) == 2
    assert "--comfyui: which names ComfyUI has for the layers of SD3Transformer2DModel" in capsys.readouterr().err
    assert not Path("new").exists()
