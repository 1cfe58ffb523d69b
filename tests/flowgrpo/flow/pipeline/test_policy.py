from itertools import product

import diffusers
import pytest
import tiny
import torch
from cases import cases
from diffusers.models.attention_dispatch import AttentionBackendName
from replayed import drift

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.flow.pipeline.velocity_field import FieldPolicy
from flowgrpo.training.fitting.saved_tensor_meter import SavedTensorMeter
from flowgrpo.training.weights.trained_weights import Weights, lora_config
from samplers import noise
from samplers.growth import grow
from samplers.kernels import Kernel
from samplers.plans import chain
from samplers.schedule import linear_sigmas
from samplers.trees import Root

PROMPTS = ["a red circle", "two blue square", "a green circle"]


def policy_of(name, **options):
    return DiffusersPolicy(tiny.PIPELINES[name](), tiny.CALLS[name], **options)


def rolled_out(policy, micro_batch=4, kernel=Kernel("flow_sde", 0.7), count=8):  # noqa: B008
    roots = [Root(i // 2, i % 2, Row(PROMPTS[i % 3], 100 + i)) for i in range(count)]
    start = tuple(torch.cat(c) for c in zip(*(policy.start([r.row]) for r in roots), strict=True))
    steps = range(len(policy.sigmas) - 2)
    with torch.no_grad():
        return grow(
            chain([kernel] * (len(policy.sigmas) - 1), steps, steps),
            policy.sigmas,
            roots,
            start,
            policy.velocity,
            lambda shape, *address: noise.noise(shape, "test", *address),
            micro_batch,
            travel=policy.travel,
        )


@pytest.mark.parametrize(
    ("name", "kernel"),
    cases(
        product(tiny.PIPELINES, ["flow_sde", "dance_sde", "cps"]),
        [("sd3", "dance_sde"), ("sd3_guided", "flow_sde"), ("flux", "cps")],
    ),
)
def test_a_replay_scores_exactly_what_the_rollout_recorded(name, kernel):
    policy = policy_of(name)
    weights = Weights(policy.modules, None)
    tree = rolled_out(policy, kernel=Kernel(kernel, 0.5))
    assert drift(policy, tree) == 0.0
    assert all(p.grad is not None for name, p in weights.named.items() if "pos_embed" not in name)


def test_drift_is_zero_with_lora_and_in_half_precision_too():
    for dtype in (torch.float32, torch.bfloat16):
        pipe = tiny.sd3().to(dtype)
        policy = DiffusersPolicy(pipe, tiny.CALLS["sd3"])
        weights = Weights(policy.modules, lora_config(2, 4, "auto", policy.modules))
        with torch.no_grad():
            for p in weights.parameters:
                p.add_(0.05 * torch.randn_like(p))
        tree = rolled_out(policy)
        assert tree.samples[0].dtype == dtype
        assert drift(policy, tree) == 0.0


@pytest.mark.parametrize("name", cases(["sd3", "flux"], ["sd3"]))
def test_float32_adapters_keep_the_activations_of_a_half_precision_base_only(name):
    kept = []
    for dtype in (torch.float32, torch.bfloat16):  # of the adapters
        policy = DiffusersPolicy(tiny.PIPELINES[name]().to(torch.bfloat16), tiny.CALLS[name])
        weights = Weights(policy.modules, lora_config(4, 8, "auto", policy.modules))
        for p in weights.parameters:
            p.data = p.data.to(dtype)
        rows = [Row(PROMPTS[0], i) for i in range(8)]
        state = policy.start(rows)
        with SavedTensorMeter(p for module in policy.modules.values() for p in module.parameters()) as meter:
            policy.velocity(state, policy.sigmas[1], rows)
        kept.append(meter.peak)
    assert kept[0] < 1.1 * kept[1]


def test_a_shifted_state_shows_in_the_drift():
    policy = policy_of("sd3")
    Weights(policy.modules, None)
    tree = rolled_out(policy)
    state = tree.evaluations[1].trained[0].next_state[0]
    state[0] += 1e-3
    assert drift(policy, tree) > 1e-5


@pytest.mark.parametrize("name", cases(tiny.PIPELINES, ["sd3_guided", "flux"]))
def test_growth_by_ode_is_the_stock_pipeline(name):
    stock = tiny.PIPELINES[name]()
    call = {**tiny.CALLS[name], "output_type": "pt", "return_dict": False}
    policy = policy_of(name)
    roots = [Root(0, i, Row(prompt, 7 + i)) for i, prompt in enumerate(PROMPTS)]
    rows = [root.row for root in roots]
    with torch.no_grad():
        tree = grow(chain([Kernel()] * 9, (), ()), policy.sigmas, roots, policy.start(rows), policy.velocity, None, 3)
    for i, row in enumerate(rows):
        expected = stock(row.prompt, generator=torch.Generator().manual_seed(row.seed), **call)[0]
        torch.testing.assert_close(policy.decode(tree.samples, rows)[i], expected[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(policy.generate([row])[0], expected[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_a_sample_does_not_depend_on_the_micro_batch(micro_batch):
    policy = policy_of("sd3")
    together, apart = rolled_out(policy, 100), rolled_out(policy, micro_batch)
    torch.testing.assert_close(together.samples[0], apart.samples[0], rtol=0, atol=1e-5)


def test_prompts_are_encoded_once_and_the_encoders_can_go():
    policy = policy_of("sd3", text_encoders="free")
    calls = []
    policy.pipe.text_encoder.register_forward_hook(lambda *_: calls.append(1))
    before = policy.pipe.text_encoder
    policy.prepare([Row(p, 0) for p in [*PROMPTS, *PROMPTS]])
    policy.offload()
    assert len(calls) == 3
    assert not isinstance(policy.pipe.text_encoder, torch.nn.Module)
    rolled_out(policy)
    assert len(calls) == 3
    with pytest.raises(InputError, match="text encoders were freed"):
        policy.start([Row("a blue circle", 0)])

    policy = policy_of("sd3", text_encoders="offload")
    policy.prepare([Row(p, 0) for p in PROMPTS])
    policy.offload()
    assert not isinstance(policy.pipe.text_encoder, torch.nn.Module)
    fresh = policy.start([Row("a blue circle", 0)])
    assert not isinstance(policy.pipe.text_encoder, torch.nn.Module)
    assert torch.equal(fresh[0], policy_of("sd3").start([Row("a blue circle", 0)])[0])
    policy.embeddings.restore()
    assert type(policy.pipe.text_encoder) is type(before)


@pytest.mark.parametrize("name", tiny.PIPELINES)
def test_cached_embeddings_are_what_the_pipeline_encodes(name):
    stock, policy = tiny.PIPELINES[name](), policy_of(name)
    arguments = {"prompt": PROMPTS, "device": torch.device("cpu"), "num_images_per_prompt": 1, "max_sequence_length": 8}
    if name != "flux":
        arguments |= {"do_classifier_free_guidance": True}
    arguments |= {"prompt_2": None} | ({} if name == "flux" else {"prompt_3": None})
    for ours, theirs in zip(policy.pipe.encode_prompt(**arguments), stock.encode_prompt(**arguments), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_embeddings_of_different_length_are_padded_with_their_masks(monkeypatch):
    pipe = tiny.sd3()

    def encode_prompt(prompt):
        length = len(prompt[0])
        return (
            torch.full((1, length, 2), float(length)),
            torch.ones(1, length, dtype=torch.bool),
            [torch.ones(length)],
            None,
        )

    monkeypatch.setattr(pipe, "encode_prompt", encode_prompt, raising=False)
    policy = DiffusersPolicy(pipe, tiny.CALLS["sd3"])
    embeds, mask, ragged, nothing = policy.pipe.encode_prompt(prompt=["ab", "abcd"])
    assert embeds[:, :, 0].tolist() == [[2, 2, 0, 0], [4, 4, 4, 4]]
    assert mask.tolist() == [[True, True, False, False], [True] * 4]
    assert [len(item) for item in ragged] == [2, 4]
    assert nothing is None


def test_evaluations_are_counted_with_their_guidance_branches():
    for name, branches in {"sd3": 1, "sd3_guided": 2, "flux": 1}.items():
        policy = policy_of(name)
        rolled_out(policy, count=6)
        assert policy.evaluations == 6 * 4 * branches


def test_call_arguments_are_checked_against_the_pipeline():
    with pytest.raises(
        InputError, match="model.call.guidance: StableDiffusion3Pipeline has no such argument, did you mean 'guid"
    ):
        DiffusersPolicy(tiny.sd3(), {"guidance": 2})
    with pytest.raises(InputError, match="model.call.latents: set by flowgrpo itself"):
        DiffusersPolicy(tiny.sd3(), {"latents": 2})


def test_call_overrides_change_the_call_for_a_while():
    policy = policy_of("sd3")
    assert len(policy.sigmas) == 5
    with policy.call_overrides(num_inference_steps=7, guidance_scale=None):
        assert len(policy.sigmas) == 8
        assert "guidance_scale" not in policy.call
    assert len(policy.sigmas) == 5


def test_velocity_at_a_sigma_off_the_table_sees_that_time():
    policy = policy_of("sd3")
    state = policy.start([Row("a red circle", 0)])
    table = policy.sigmas
    seen = []
    policy.pipe.transformer.register_forward_pre_hook(
        lambda m, a, k: seen.append(k["timestep"].item()), with_kwargs=True
    )
    policy.velocity(state, table[1], [Row("a red circle", 0)])
    policy.velocity(state, 0.3125, [Row("a red circle", 0)])
    assert seen == [pytest.approx(1000 * table[1]), 312.5]


def test_a_field_policy_samples_its_flow():
    """A field that points from noise to one point ends there exactly."""

    class ToPoint(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.point = torch.nn.Parameter(torch.tensor([2.0, -1.0]))

        def forward(self, x, sigma, rows):
            return (x - self.point) / sigma[:, None]

    policy = FieldPolicy(ToPoint(), (2,), linear_sigmas(5))
    samples = policy.generate([Row("", i) for i in range(4)])
    torch.testing.assert_close(samples, torch.tensor([2.0, -1.0]).expand(4, 2))
    assert policy.evaluations == 4 * 5
    assert torch.equal(policy.start([Row("", 3)])[0], policy.start([Row("x", 3)])[0])
    with pytest.raises(InputError, match=r"^eval\.adapter_steps: a velocity field is sampled with all of its training"):
        policy.limited([0.0, 0.5], lambda on: None)


def test_a_pipeline_with_a_cache_or_a_lossy_attention_is_no_policy():
    pipe = tiny.flux()
    pipe.transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.2))
    with pytest.raises(InputError, match=r"transformer has a cache enabled \(FirstBlockCacheConfig\).*disable_cache"):
        DiffusersPolicy(pipe, tiny.CALLS["flux"])
    pipe.transformer.disable_cache()
    DiffusersPolicy(pipe, tiny.CALLS["flux"])
    for processor in pipe.transformer.attn_processors.values():
        processor._attention_backend = AttentionBackendName.SAGE
    with pytest.raises(InputError, match="transformer: .*quantises"):
        DiffusersPolicy(pipe, tiny.CALLS["flux"])
