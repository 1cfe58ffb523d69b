"""Operations that are planned without numbers, beside torch's count of the same pipelines with numbers."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from zoo import SPECIMENS

from flowgrpo import config
from flowgrpo.flow import setup
from flowgrpo.flow.planning import memory_trace
from flowgrpo.flow.planning.memory_trace import Kept, trial
from flowgrpo.training.planning.allocation_counter import Peaks
from flowgrpo.training.planning.iteration_cost import forwards_of

pytestmark = pytest.mark.usefixtures("few_objects")

# Guidance in one call, none, in a call of each branch of one of two networks, and of a single one.
CLASSES = (
    *("StableDiffusion3Pipeline", "FluxPipeline", "WanPipeline (2.2)"),
    pytest.param("QwenImagePipeline", marks=pytest.mark.zoo),
)


def settings(folder, specimen, **model):
    written = {"path": str(folder), "call": dict(specimen.call), "lora": {"rank": 2, "alpha": 4}, **model}
    prompts = {"train": "ocr:train", "eval": "ocr:eval"}
    return config.validated({"model": written, "prompts": prompts, "rewards": [{"use": "jpeg_size"}]})


def counted(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", CLASSES)
def test_what_is_planned_is_what_is_computed(name, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_trace, "_learnt", lambda *_: (Peaks(), Kept(once=0, each=0)))  # no update is asked for
    monkeypatch.setattr(memory_trace, "_decoded_in_tiles", lambda *_: None)
    specimen = SPECIMENS[name]
    specimen.build().save_pretrained(tmp_path)
    chosen, row = settings(tmp_path, specimen), specimen.rows[0]
    policy, _ = setup.policy_and_weights(chosen, torch.device("cpu"))
    calls = []
    with torch.no_grad():
        policy.prepare([row])
        state = policy.start([row])
        for network in policy.modules.values():
            network.register_forward_pre_hook(lambda *_: calls.append(1))
        step = counted(lambda: policy.walk.velocity(state, policy.sigmas[0], [row]))
        decoded = []
        decoding = counted(lambda: decoded.append(policy.walk.decode(state, [row], by_landing=False)))
    sampling = trial(chosen, str(tmp_path), row).rollout
    assert sampling.operations == step > 0
    assert sampling.calls == len(calls)
    assert sampling.launches > 20
    assert sampling.decode_operations == decoding > 0
    assert sampling.sample == 4 * decoded[0].numel()


@pytest.mark.parametrize(
    ("model", "forwards"),
    [
        ({}, 2),
        ({"gradient_checkpointing": True}, 3),
        ({"lora": None}, 3),
        ({"lora": None, "gradient_checkpointing": True}, 4),
    ],
)
def test_an_update_takes_as_many_forwards_as_the_cost_model_says(model, forwards, tmp_path):
    specimen = SPECIMENS["FluxPipeline"]
    specimen.build().save_pretrained(tmp_path)
    chosen, row = settings(tmp_path, specimen, **model), specimen.rows[0]
    policy, _ = setup.policy_and_weights(chosen, torch.device("cpu"))
    with torch.no_grad():
        policy.prepare([row])
        state = policy.start([row])
        forward = counted(lambda: policy.walk.velocity(state, policy.sigmas[0], [row]))

    def learn():
        policy.walk.velocity(state, policy.sigmas[0], [row])[0].float().square().mean().backward()

    assert forwards_of(chosen) == forwards
    assert counted(learn) / forward == pytest.approx(forwards, rel=0.15)
