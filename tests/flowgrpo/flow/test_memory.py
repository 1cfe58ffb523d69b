import psutil
import pytest
import tiny
import torch

from flowgrpo import config
from flowgrpo.errors import InputError
from flowgrpo.flow import memory, setup


def settings(tiny_model, **model):
    return config.validated({"model": {"path": str(tiny_model), **model}})


def count(modules):
    return sum(p.numel() for module in modules for p in module.parameters())


def buffers(module):
    return sum(b.numel() for b in module.state_dict().values()) - count([module])


def test_full_fine_tuning_counts_every_copy(tiny_model):
    pipe = tiny.sd3()
    transformer = count([pipe.transformer]) + buffers(pipe.transformer)
    encoders = count([pipe.text_encoder, pipe.text_encoder_2])
    need = memory.memory_estimate(settings(tiny_model, lora=None))
    # float32: weight, gradient, two moments, average, and the reference of flow_grpo's KL; the encoders rest in host memory
    assert need["gpu_bytes"] == 4 * (6 * transformer + count([pipe.vae]))
    assert need["host_bytes"] == 4 * encoders
    kept = memory.memory_estimate(settings(tiny_model, lora=None, text_encoders="keep"))
    assert kept == {"gpu_bytes": need["gpu_bytes"] + need["host_bytes"], "host_bytes": 0}


def test_a_lora_counts_what_it_really_trains(tiny_model):
    chosen = settings(tiny_model, lora={"rank": 2, "alpha": 4}, dtype="bfloat16", text_encoders="keep")
    _, weights = setup.policy_and_weights(chosen, torch.device("cpu"))
    trained = sum(p.numel() for p in weights.parameters)
    pipe = tiny.sd3()
    every = [pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_2]
    frozen = count(every) + buffers(pipe.transformer)
    assert memory.memory_estimate(chosen)["gpu_bytes"] == 2 * frozen + 4 * 5 * trained
    # resting encoders are on the device for as long as prompts are encoded, and that is the peak here
    assert (
        memory.memory_estimate(settings(tiny_model, lora={"rank": 1, "alpha": 1}, text_encoders="free"))["gpu_bytes"]
        == 4 * frozen
    )


def test_too_little_memory_is_refused_with_the_estimate(tiny_model, monkeypatch):
    chosen = settings(tiny_model, lora=None)
    memory.check(chosen, torch.device("cpu"))
    small = psutil.virtual_memory()._replace(total=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: small)
    with pytest.raises(InputError, match=r"needs at least 0\.0 GiB .* this machine has 0\.0 GiB; train a LoRA"):
        memory.check(chosen, torch.device("cpu"))
