import math
from types import SimpleNamespace

import broken
import psutil
import pytest
import tiny
import torch
from zoo import SPECIMENS

from flowgrpo import config
from flowgrpo.errors import InputError
from flowgrpo.flow import setup
from flowgrpo.flow.model import memory_estimate
from flowgrpo.flow.model.memory_estimate import component_shapes, loading_peak
from flowgrpo.flow.pipeline.loading import load
from flowgrpo.training.weights.quantisation import layers_in_blocks

NETWORK = "transformer/diffusion_pytorch_model.safetensors"
LORA = {"rank": 1, "alpha": 1}


def settings(tiny_model, **model):
    return config.validate({"model": {"path": str(tiny_model), **model}})


def need_of(chosen):
    return memory_estimate.memory_estimate(chosen)


def count(modules):
    return sum(p.numel() for module in modules for p in module.parameters())


def buffers(module):
    return sum(b.numel() for b in module.state_dict().values()) - count([module])


def test_full_fine_tuning_counts_every_copy(tiny_model):
    pipe = tiny.sd3()
    transformer = count([pipe.transformer]) + buffers(pipe.transformer)
    encoders = count([pipe.text_encoder, pipe.text_encoder_2])
    need = need_of(settings(tiny_model, lora=None))
    # float32: weight, gradient, two moments, average, and the reference of flow_grpo's KL; the encoders rest in host memory
    assert need["gpu_bytes"] == 4 * (6 * transformer + count([pipe.vae]))
    assert need["host_bytes"] == 4 * encoders
    kept = need_of(settings(tiny_model, lora=None, text_encoders="keep"))
    assert kept == {"gpu_bytes": need["gpu_bytes"] + need["host_bytes"], "reward_bytes": 0, "host_bytes": 0}


@pytest.mark.parametrize("lora", [{"rank": 2, "alpha": 4}, None])
def test_the_copy_that_drafts_are_sampled_by_is_counted(tiny_model, lora):
    """What the copies of the layers in the blocks keep: codes, and a scale for each row."""
    model = {"path": str(tiny_model), "lora": lora, "dtype": "bfloat16"}
    plain, drafting = (config.validate({"model": model, "train": {"draft": d}}) for d in (None, {"precision": "int8"}))
    layers = layers_in_blocks(tiny.sd3().transformer, "model.quantise").values()
    kept = sum(layer.weight.numel() + layer.out_features * 4 for layer in layers)
    need, more = need_of(plain), need_of(drafting)
    assert more["gpu_bytes"] - need["gpu_bytes"] == kept > 0
    assert more["host_bytes"] == need["host_bytes"]
    tried = dict(memory_estimate.smaller(drafting))
    without = tried["train.draft.precision=null"]
    assert without == plain.model_copy(update={"train": without.train})
    assert not [key for key in tried if key.startswith("model.quantise")]


def test_a_lora_counts_what_it_really_trains(tiny_model):
    chosen = settings(tiny_model, lora={"rank": 2, "alpha": 4}, dtype="bfloat16", text_encoders="keep")
    _, weights = setup.policy_and_weights(chosen, torch.device("cpu"))
    trained = sum(p.numel() for p in weights.parameters)
    pipe = tiny.sd3()
    every = [pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_2]
    frozen = count(every) + buffers(pipe.transformer)
    assert need_of(chosen)["gpu_bytes"] == 2 * frozen + 4 * 5 * trained


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4}])
def test_every_snapshot_is_counted_as_a_copy(tiny_model, lora):
    def need(keep):
        written = {"preset": "seppo", "likelihood": {"bank": {"keep": keep}}}
        model = {"path": str(tiny_model), "lora": lora, "text_encoders": "free"}
        return config.validate({"model": model, "algorithm": written})

    _, weights = setup.policy_and_weights(need(7), torch.device("cpu"))
    trained = sum(p.numel() for p in weights.parameters)
    most, least = (need_of(need(keep))["gpu_bytes"] for keep in (7, 2))
    buffered = 0 if lora else buffers(weights.modules["transformer"])
    assert most - least == 4 * 5 * (trained + buffered)


def test_text_encoders_and_networks_are_never_on_the_device_together(tiny_model):
    pipe = tiny.sd3()
    encoders, vae = count([pipe.text_encoder, pipe.text_encoder_2]), count([pipe.vae])
    transformer = count([pipe.transformer]) + buffers(pipe.transformer)
    components = component_shapes(str(tiny_model))
    for word in ("offload", "free"):
        apart = settings(tiny_model, lora=LORA, text_encoders=word)
        assert loading_peak(apart, components) == 4 * (encoders + vae)
        assert 4 * (transformer + vae) < need_of(apart)["gpu_bytes"] < 4 * (transformer + vae + encoders)
    kept = settings(tiny_model, lora=LORA, text_encoders="keep")
    assert loading_peak(kept, components) == 4 * (encoders + vae + transformer)


def test_a_pipeline_with_a_control_network_is_loaded_whole(tmp_path):
    SPECIMENS["StableDiffusion3ControlNetPipeline"].build().save_pretrained(tmp_path / "m")
    components = component_shapes(str(tmp_path / "m"))
    whole = sum(math.prod(shape) for own in components.values() for shape in own.values())
    assert loading_peak(settings(tmp_path / "m", lora=LORA, text_encoders="free"), components) == 4 * whole


def test_a_pipeline_that_cannot_encode_apart_is_loaded_whole(tiny_model, monkeypatch):
    apart = settings(tiny_model, lora=LORA, text_encoders="free")
    components = component_shapes(str(tiny_model))
    networks = sum(math.prod(shape) for shape in components["transformer"].values())
    first = loading_peak(apart, components)
    monkeypatch.setattr(load, "planned_class", lambda path: type("Whole", (), {}))
    assert loading_peak(apart, components) == first + 4 * networks


# FLUX.2-dev: 32.2 and 24 billion weights, as many in blocks as can be quantised.
FLUX2 = {
    "text_encoder": {"model.weight": (24_000_000_000,)},
    "transformer": {"transformer_blocks.0.attn.to_q.weight": (32_000, 1_000_000), "x.weight": (220_000_000,)},
    "vae": {"decoder.weight": (84_000_000,)},
}
INDEX = {"_class_name": "Flux2Pipeline", **{name: ["diffusers", "X"] for name in FLUX2}}


def refused(monkeypatch, gigabytes, **model):
    """What is said of a run of FLUX.2-dev on a GPU of that size; None if it may begin."""
    monkeypatch.setattr(memory_estimate, "component_shapes", lambda path, **_: FLUX2)
    monkeypatch.setattr(load, "index_of", lambda path: INDEX)
    properties = SimpleNamespace(total_memory=int(gigabytes * 1e9))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    try:
        memory_estimate.check(settings("black-forest-labs/FLUX.2-dev", lora=LORA, **model), torch.device("cuda"))
    except InputError as error:
        return str(error)


def test_flux2_dev_fits_80_gb_and_a_refusal_names_what_would_spare_how_much(monkeypatch):
    half = {"dtype": "bfloat16"}
    assert refused(monkeypatch, 80, **half) is None
    kept = refused(monkeypatch, 80, **half, text_encoders="keep")
    assert kept.endswith(
        "needs at least 104.9 GiB for weights and optimizer, this GPU has 74.5 GiB; 44.7 GiB less with "
        "model.text_encoders=offload, 44.7 GiB less with model.text_encoders=free, 43.8 GiB less with model.quantise=nf4, "
        "29.8 GiB less with model.quantise=int8"
    )
    asked = [part.split(" with ")[1] for part in refused(monkeypatch, 48, **half).split("; ")[1].split(", ")]
    assert asked == ["model.quantise=nf4", "model.quantise=int8", "model.vae=offload"]
    assert refused(monkeypatch, 49, **half, quantise="int8") is None
    last = refused(monkeypatch, 24, **half, quantise="nf4", text_encoders="free")
    assert last.endswith("; no switch makes it much less, take a smaller model or more memory")


def test_the_weights_of_rewards_are_counted_and_named(tiny_model, monkeypatch):
    rewards = [{"use": "pickscore", "options": {"dtype": "bfloat16"}}, "http://127.0.0.1:8100/hpsv2"]
    plain = settings(tiny_model)
    scored = plain.model_copy(update={"rewards": config.validate({"model": {"path": "m"}, "rewards": rewards}).rewards})
    size = 1_950_000_000  # half of the card's 3.9 GB
    assert need_of(scored) == {**need_of(plain), "reward_bytes": size, "gpu_bytes": need_of(plain)["gpu_bytes"] + size}
    small = psutil.virtual_memory()._replace(total=10**9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: small)
    memory_estimate.check(plain, torch.device("cpu"))
    with pytest.raises(
        InputError, match=r"needs at least 1\.8 GiB for weights and optimizer \(1\.8 of it for rewards\)"
    ):
        memory_estimate.check(scored, torch.device("cpu"))


@pytest.mark.parametrize("spoil", [broken.name_variant, lambda folder: broken.shard(folder / NETWORK, 2, "fp16")])
def test_the_estimate_reads_the_files_of_the_variant(tiny_model, tmp_path, spoil):
    folder = broken.copied(tiny_model, tmp_path / "m")
    spoil(folder)
    assert component_shapes(str(folder), variant="fp16") == component_shapes(str(tiny_model))
    assert need_of(settings(folder, variant="fp16")) == need_of(settings(tiny_model))
    with pytest.raises(InputError, match="holds fp16 weights only, set model.variant=fp16"):
        component_shapes(str(folder))


def test_the_estimate_counts_pickles(tiny_model, tmp_path):
    folder = broken.copied(tiny_model, tmp_path / "m")
    for name in (NETWORK, "text_encoder/model.safetensors"):
        broken.pickle(folder / name)
    assert component_shapes(str(folder)) == component_shapes(str(tiny_model))


def test_too_little_memory_is_refused_with_the_estimate(tiny_model, monkeypatch):
    chosen = settings(tiny_model, lora=None)
    memory_estimate.check(chosen, torch.device("cpu"))
    small = psutil.virtual_memory()._replace(total=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: small)
    said = r"needs at least 0\.0 GiB .* this machine has 0\.0 GiB; no switch makes it much less"
    with pytest.raises(InputError, match=said):
        memory_estimate.check(chosen, torch.device("cpu"))
