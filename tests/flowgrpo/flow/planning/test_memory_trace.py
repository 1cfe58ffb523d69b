"""Memory and operations that are planned without numbers, beside what the same pipelines take with them."""

import gc
import math
from itertools import product

import pytest
import torch
from cases import cases
from low_layers import put_layers
from torch.utils.flop_counter import FlopCounterMode
from zoo import SPECIMENS

from flowgrpo import config
from flowgrpo.data.prompts import Prompt, Row
from flowgrpo.flow import setup
from flowgrpo.flow.pipeline.inputs.call_cache import tensor_bytes
from flowgrpo.flow.pipeline.loading.meta_pipeline import configs
from flowgrpo.flow.planning import memory_trace
from flowgrpo.flow.planning.memory_trace import Kept, trial
from flowgrpo.flow.rollouts.prompt_encoding import encode_run
from flowgrpo.training.planning import meta_networks
from flowgrpo.training.planning.allocation_counter import AllocationCounter, Peaks
from flowgrpo.training.planning.iteration_cost import forwards_of
from flowgrpo.training.planning.memory_phases import with_setting

pytestmark = pytest.mark.usefixtures("few_objects")

ALLOCATED = ("FluxPipeline", "StableDiffusion3Pipeline", "SanaPipeline", "WanPipeline")
# Two networks, pictures in the prompt; then sounds, a picture to begin from, and more of the same kinds.
CLASSES = ("WanPipeline (2.2)", "QwenImageEditPipeline")
NO_UPDATE = (Peaks(), Kept(once=0, each=0))  # where it is not asked for
MORE = (
    "StableAudio3Pipeline",
    "FluxImg2ImgPipeline",
    "QwenImagePipeline",
    "QwenImageEditPlusPipeline",
    "ZImagePipeline",
    "Flux2Pipeline",
    "HunyuanVideo15Pipeline",
    "LTX2Pipeline",
)


@pytest.fixture
def no_decoding(monkeypatch):
    """A trial decodes nothing."""
    monkeypatch.setattr(
        memory_trace, "_measure_decoding", lambda *_: memory_trace._Decoding(peaks=Peaks(), operations=0, sample=0)
    )


@pytest.fixture
def no_update(monkeypatch):
    """A trial tries no update."""
    monkeypatch.setattr(memory_trace, "_measure_update", lambda *_: NO_UPDATE)


@pytest.fixture
def no_checkpointing(monkeypatch):
    """A trial tries no update with checkpointing."""
    real = memory_trace._measure_update

    def measure_update(policy, *rest):
        checkpointed = any(network.is_gradient_checkpointing for network in policy.modules.values())
        return NO_UPDATE if checkpointed else real(policy, *rest)

    monkeypatch.setattr(memory_trace, "_measure_update", measure_update)


def settings(folder, specimen, **model):
    lora = {"rank": 2, "alpha": 4, "targets": ["to_q"]}  # each adapted layer takes as many operations as a few others
    return config.validate(
        {
            "model": {"path": str(folder), "call": dict(specimen.call), "lora": lora, **model},
            "prompts": {"train": "ocr:train", "eval": "ocr:eval"},
            "rewards": [{"use": "jpeg_size"}],
        }
    )


def evaluated(chosen, **call):
    return chosen.model_copy(update={"eval": chosen.eval.model_copy(update={"call": call})})


def loaded(chosen):
    return setup.policy_and_weights(chosen, torch.device("cpu"))


def begun(policy, rows):
    with torch.no_grad():
        policy.prepare(rows)
        return policy.start(rows)


def stepped(policy, weights, rows):
    """Peaks of a step with numbers: without gradients, and with them there."""
    live = AllocationCounter()
    for module in policy.modules.values():
        for tensor in (*module.parameters(), *module.buffers()):
            live.ignore(tensor)
    state = begun(policy, rows)
    for p in weights.parameters:
        p.grad = torch.zeros_like(p)
    gc.collect()
    with live:
        with torch.no_grad():
            policy.walk.velocity(state, policy.sigmas[0], rows)
        rollout = live.peak
        gc.collect()
        live.restart()
        velocity = policy.walk.velocity(state, policy.sigmas[0], rows)
        sum(v.float().square().mean() for v in velocity).backward()
    return rollout, live.peak


def counted(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def assert_computed(sampling, policy, row):
    """What is planned of a step and of decoding is what torch counts of them with numbers."""
    state, calls, decoded = begun(policy, [row]), [], []
    hooks = [network.register_forward_pre_hook(lambda *_: calls.append(1)) for network in policy.modules.values()]
    with torch.no_grad():
        step = counted(lambda: policy.walk.velocity(state, policy.sigmas[0], [row]))
        decoding = counted(lambda: decoded.append(policy.walk.decode(state, [row], by_landing=False)))
    for hook in hooks:
        hook.remove()
    assert sampling.operations == step > 0
    assert sampling.calls == len(calls)
    assert sampling.launches > 20
    assert sampling.decode_operations == decoding > 0
    assert sampling.sample == 4 * decoded[0].numel()


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    """A folder with a tiny Flux pipeline of three equal blocks, and its trial with plain settings."""
    specimen, folder = SPECIMENS["FluxPipeline"], tmp_path_factory.mktemp("flux")
    pipe = specimen.build()
    pipe.transformer = pipe.transformer.from_config({**pipe.transformer.config, "num_single_layers": 3})
    pipe.save_pretrained(folder)
    chosen = evaluated(settings(folder, specimen), num_inference_steps=9)
    return folder, trial(chosen, str(folder), specimen.rows[0])


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    cases(product(ALLOCATED, (False, True)), [*product(ALLOCATED[:1], (False, True))]),
)
def test_what_is_planned_is_what_is_allocated_and_computed(name, checkpointing, tmp_path, request):
    specimen = SPECIMENS[name]
    row = specimen.rows[0]
    if (name, checkpointing) == ("FluxPipeline", False):
        folder, planned = request.getfixturevalue("flux")
        chosen = settings(folder, specimen)
    else:
        specimen.build().save_pretrained(tmp_path)
        chosen = settings(tmp_path, specimen, gradient_checkpointing=checkpointing)
        planned = trial(chosen, str(tmp_path), row)
    policy, weights = loaded(chosen)
    rollout, update = stepped(policy, weights, [row])
    assert planned.rollout.step.of(1) == pytest.approx(rollout, rel=0.15)
    found = planned.update_checkpointed if checkpointing else planned.update
    assert found.of(1) == pytest.approx(update, rel=0.15)
    assert_computed(planned.rollout, policy, row)


@pytest.mark.parametrize(
    ("model", "forwards"),
    [
        ({}, 2),
        ({"gradient_checkpointing": True}, 3),
        ({"lora": None}, 3),
        pytest.param({"lora": None, "gradient_checkpointing": True}, 4, marks=pytest.mark.zoo),
    ],
)
def test_an_update_takes_as_many_forwards_as_the_cost_model_says(model, forwards, flux):
    specimen = SPECIMENS["FluxPipeline"]
    chosen, row = settings(flux[0], specimen, **model), specimen.rows[0]
    policy, _ = loaded(chosen)
    state = begun(policy, [row])
    with torch.no_grad():
        forward = counted(lambda: policy.walk.velocity(state, policy.sigmas[0], [row]))

    def learn():
        policy.walk.velocity(state, policy.sigmas[0], [row])[0].float().square().mean().backward()

    assert forwards_of(chosen) == forwards
    assert counted(learn) / forward == pytest.approx(forwards, rel=0.15)


@pytest.mark.usefixtures("small_pictures")
@pytest.mark.parametrize("name", cases((*CLASSES, *ALLOCATED, *MORE), CLASSES))
def test_a_pipeline_is_planned_from_its_configs(name, tmp_path):
    specimen = SPECIMENS[name]
    pipe = specimen.build()
    pipe.save_pretrained(tmp_path)
    chosen = settings(tmp_path, specimen)
    policy, _ = loaded(chosen)
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()
    with configs(str(tmp_path)) as folder:
        planned = trial(chosen, folder, specimen.rows[0])
    networks = {n: m for n, m in pipe.components.items() if isinstance(m, torch.nn.Module)}
    for component, network in networks.items():
        weights = sum(t.numel() * t.element_size() for t in (*network.parameters(), *network.buffers()))
        assert planned.components[component] == pytest.approx(weights, rel=0.02)
    sampling, update = planned.rollout, planned.update.of(1)
    assert min(planned.trained, planned.state, planned.encode, sampling.step.of(1), sampling.decode.of(1)) > 0
    assert update >= sampling.step.of(1)  # the same where encoding a picture takes the most
    assert planned.update_checkpointed is None or planned.update_checkpointed.of(1) <= update
    assert_computed(sampling, policy, specimen.rows[0])


@pytest.mark.usefixtures("no_update")
def test_a_quantised_base_is_planned_with_the_layers_it_makes_anew(flux):
    specimen, (folder, whole) = SPECIMENS["FluxPipeline"], flux
    quantised = trial(settings(folder, specimen, quantise="int8"), str(folder), specimen.rows[0])
    layer = max(
        math.prod(shape) for name, shape in whole.shapes["transformer"].items() if ".0." in name and len(shape) == 2
    )
    before, after = (each.rollout.step.of(100) for each in (whole, quantised))
    assert 0 <= after - before <= 2 * 4 * layer  # once, for any number of rows
    assert quantised.dequantises
    assert not whole.dequantises
    assert quantised.trained == whole.trained


@pytest.mark.usefixtures("no_decoding", "no_update")
def test_a_row_of_longer_text_takes_more(tmp_path):
    specimen = SPECIMENS["QwenImagePipeline"]
    pipe = specimen.build()
    pipe.transformer = pipe.transformer.from_config({**pipe.transformer.config, "num_layers": 1})
    pipe.save_pretrained(tmp_path)
    chosen = settings(tmp_path, specimen, call={**specimen.call, "true_cfg_scale": 1.0})
    short, long = (trial(chosen, str(tmp_path), Row(text, 0)) for text in ("a cat", "a cat " * 40))
    assert long.rollout.step.of(1) > 1.2 * short.rollout.step.of(1)


@pytest.mark.usefixtures("no_decoding", "no_update")
@pytest.mark.parametrize(("guidance_scale", "rollouts"), [(4.0, "rollout"), (1.0, "pipeline")])
def test_the_embeddings_are_planned_that_a_prompt_keeps(guidance_scale, rollouts, tmp_path):
    """A run whose rollouts alone are guided keeps those of each call; a held-out prompt keeps those of one."""
    specimen = SPECIMENS["StableDiffusion3Pipeline"]
    specimen.build().save_pretrained(tmp_path)
    unguided = settings(tmp_path, specimen, call={**specimen.call, "guidance_scale": guidance_scale})
    chosen = with_setting(unguided, "model.guidance", rollouts)  # which a config takes for other likelihoods
    row = specimen.rows[0]
    planned = trial(chosen, str(tmp_path), row)
    sizes = []
    for train, held_out in (([row], []), ([], [row])):
        policy, _ = loaded(chosen)
        prompts = [[Prompt(each.prompt, each.columns) for each in rows] for rows in (train, held_out)]
        encode_run(policy, chosen, *prompts, device=torch.device("cuda"), rolls_out=bool(train))
        sizes.append(sum(tensor_bytes(output) for output in policy.embeddings._outputs.values()))
    assert [planned.embeddings, planned.held_out_embeddings] == sizes
    assert (sizes[0] > sizes[1]) == (rollouts == "rollout")


@pytest.mark.usefixtures("no_decoding", "no_checkpointing")
def test_copies_of_weights_in_half_precision_are_there_once_for_all_rows(flux):
    specimen, (folder, _) = SPECIMENS["FluxPipeline"], flux
    chosen = settings(folder, specimen, lora=None, dtype="bfloat16")
    planned = trial(chosen, str(folder), specimen.rows[0])
    policy, weights = loaded(chosen)
    rollout, update = stepped(policy, weights, [specimen.rows[0]] * 3)
    assert planned.rollout.step.of(3) == pytest.approx(rollout, rel=0.15)
    assert planned.update.of(3) == pytest.approx(update, rel=0.15)


@pytest.mark.parametrize("word", ["int8", "fp8"])
def test_what_products_in_eight_bits_need_is_bounded_by_the_widest_layer(flux, word):
    specimen, (folder, planned) = SPECIMENS["FluxPipeline"], flux
    policy, _ = loaded(settings(folder, specimen))
    outputs = [m.out_features for m in policy.modules["transformer"].modules() if isinstance(m, torch.nn.Linear)]
    assert planned.rollout.widest % max(outputs) == 0
    live, state = AllocationCounter(), begun(policy, [specimen.rows[0]])
    for network in policy.modules.values():
        put_layers(network, word)
        for tensor in (*network.parameters(), *network.buffers()):
            live.ignore(tensor)
    with live, torch.no_grad():
        policy.walk.velocity(state, policy.sigmas[0], [specimen.rows[0]])
    assert live.peak <= planned.rollout.step.beside(0, 8 * planned.rollout.widest).of(1) < 2 * live.peak


@pytest.mark.usefixtures("no_decoding")
def test_blocks_that_are_not_run_are_counted_nearly_as_if_they_were(flux, monkeypatch):
    specimen, (folder, short) = SPECIMENS["FluxPipeline"], flux
    monkeypatch.setattr(meta_networks, "_repeated_blocks", lambda module: ())
    whole = trial(settings(folder, specimen), str(folder), specimen.rows[0])
    assert short.encode == pytest.approx(whole.encode, rel=0.01)
    for rows in (1, 4):
        assert short.rollout.step.of(rows) == pytest.approx(whole.rollout.step.of(rows), rel=0.01)
        assert short.update_checkpointed.of(rows) == pytest.approx(whole.update_checkpointed.of(rows), rel=0.01)
        assert short.update.of(rows) == pytest.approx(whole.update.of(rows), rel=0.05)


@pytest.mark.usefixtures("no_update")
def test_an_evaluation_is_tried_where_its_call_takes_more(flux, monkeypatch):
    monkeypatch.setattr(memory_trace, "_measure_tiled_decoding", lambda *_: None)
    specimen, (folder, longer) = SPECIMENS["FluxPipeline"], flux
    assert longer.evaluate is None  # of more steps alone
    chosen = evaluated(settings(folder, specimen), height=2 * specimen.call["height"])
    planned = trial(chosen, str(folder), specimen.rows[0])
    assert planned.evaluate.sample == 2 * planned.rollout.sample
    assert planned.evaluate.step.of(1) > planned.rollout.step.of(1)
