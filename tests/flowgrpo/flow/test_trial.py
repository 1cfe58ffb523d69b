"""What is planned without numbers, beside what the same pipelines allocate with them."""

import gc

import pytest
import torch
from zoo import SPECIMENS

from flowgrpo import config
from flowgrpo.data.prompts import Row
from flowgrpo.flow import setup
from flowgrpo.flow.pipeline.weightless import configs
from flowgrpo.flow.trial import trial
from flowgrpo.training.hollow import Live

CLASSES = (
    *("FluxPipeline", "StableDiffusion3Pipeline", "QwenImagePipeline", "ZImagePipeline", "SanaPipeline", "WanPipeline"),
    *("Flux2Pipeline", "WanPipeline (2.2)", "HunyuanVideo15Pipeline", "LTX2Pipeline", "StableAudio3Pipeline"),
    *("QwenImageEditPlusPipeline", "FluxImg2ImgPipeline"),
)


def settings(folder, specimen, **model):
    return config.validated(
        {
            "model": {"path": str(folder), "call": dict(specimen.call), "lora": {"rank": 2, "alpha": 4}, **model},
            "prompts": {"train": "ocr:train", "eval": "ocr:eval"},
            "rewards": [{"use": "jpeg_size"}],
        }
    )


def really(chosen, row):
    """The peak of a step with numbers and its backward pass, where gradients are there already; and of one without."""
    policy, weights = setup.policy_and_weights(chosen, torch.device("cpu"))
    live = Live()
    for module in policy.modules.values():
        for tensor in (*module.parameters(), *module.buffers()):
            live.ignore(tensor)
    with torch.no_grad():
        policy.prepare([row])
        state = policy.start([row])
    for p in weights.parameters:
        p.grad = torch.zeros_like(p)
    gc.collect()
    with live:
        with torch.no_grad():
            policy.walk.velocity(state, policy.sigmas[0], [row])
        rollout = live.peak
        gc.collect()
        live.restart()
        velocity = policy.walk.velocity(state, policy.sigmas[0], [row])
        sum(v.float().square().mean() for v in velocity).backward()
    return rollout, live.peak


@pytest.mark.parametrize("name", ["FluxPipeline", "StableDiffusion3Pipeline", "SanaPipeline", "WanPipeline"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_is_planned_is_what_is_allocated(name, checkpointing, tmp_path):
    specimen = SPECIMENS[name]
    specimen.build().save_pretrained(tmp_path)
    chosen = settings(tmp_path, specimen, gradient_checkpointing=checkpointing)
    row = specimen.rows[0]
    planned = trial(chosen, str(tmp_path), row)
    rollout, update = really(chosen, row)
    assert planned.rollout == pytest.approx(rollout, rel=0.15)
    assert (planned.update_checkpointed if checkpointing else planned.update) == pytest.approx(update, rel=0.15)


@pytest.mark.parametrize("name", CLASSES)
def test_a_pipeline_is_planned_from_its_configs(name, tmp_path):
    specimen = SPECIMENS[name]
    pipe = specimen.build()
    pipe.save_pretrained(tmp_path)
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()
    with configs(str(tmp_path)) as folder:
        planned = trial(settings(tmp_path, specimen), folder, specimen.rows[0])
    networks = {n: m for n, m in pipe.components.items() if isinstance(m, torch.nn.Module)}
    for component, network in networks.items():
        weights = sum(t.numel() * t.element_size() for t in (*network.parameters(), *network.buffers()))
        assert planned.components[component] == pytest.approx(weights, rel=0.02)
    assert min(planned.trained, planned.state, planned.encode, planned.rollout, planned.decode) > 0
    assert planned.update >= planned.rollout  # the same where a picture is encoded in each call, which takes the most
    assert planned.update_checkpointed is None or planned.update_checkpointed <= planned.update


def test_a_quantised_base_is_planned_with_the_layers_it_makes_anew(tmp_path):
    specimen = SPECIMENS["FluxPipeline"]
    specimen.build().save_pretrained(tmp_path)
    whole, quantised = (
        trial(settings(tmp_path, specimen, quantise=form), str(tmp_path), specimen.rows[0]) for form in (None, "int8")
    )
    assert quantised.rollout >= whole.rollout
    assert quantised.trained == whole.trained


def test_a_row_of_longer_text_takes_more(tmp_path):
    specimen = SPECIMENS["QwenImagePipeline"]
    specimen.build().save_pretrained(tmp_path)
    chosen = settings(tmp_path, specimen)
    short, long = (trial(chosen, str(tmp_path), Row(text, 0)) for text in ("a cat", "a cat " * 40))
    assert long.update > 1.2 * short.update
