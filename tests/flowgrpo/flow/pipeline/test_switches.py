import typing

import diffusers
import pytest
import tiny
import torch
from diffusers import TransformerTemporalModel
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from flowgrpo import config
from flowgrpo.commands import train as run
from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow import setup
from flowgrpo.flow.pipeline import attention, backends, guidance, switches
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.training.weights import Weights, lora_config
from samplers import noise
from samplers.kernels import Kernel, log_prob
from samplers.plans import chain
from samplers.trees import Root, edge_transition, grow

ROWS = [Row(prompt, 100 + i) for i, prompt in enumerate(["a red circle", "two blue square", "a green circle"])]
CPU = torch.device("cpu")


def policy_of(name):
    return DiffusersPolicy(tiny.PIPELINES[name](), tiny.CALLS[name])


def trained(policy):
    """The samples, log-probs and decoded pictures of a rollout, its drift, and the gradients of its replay, with LoRA."""
    torch.manual_seed(1)
    weights = Weights(policy.modules, lora_config(2, 4, "auto", policy.modules))
    with torch.no_grad():
        for p in weights.parameters:
            p.add_(0.05 * torch.randn_like(p))
        tree = grow(
            chain([Kernel("flow_sde", 0.7)] * 4, range(3), range(3)),
            policy.sigmas,
            [Root(i, 0, row) for i, row in enumerate(ROWS)],
            policy.start(ROWS),
            policy.velocity,
            lambda shape, *address: noise.noise(shape, "test", *address),
            3,
        )
    drift, log_probs = 0.0, []
    for evaluation in tree.evaluations:
        for edges in evaluation.trained:
            velocity = policy.velocity(evaluation.state, evaluation.sigma, evaluation.rows)
            mean, std = edge_transition(edges, evaluation.sigma, evaluation.state, velocity, tree.sigma_cap)
            replayed = log_prob(edges.next_state, mean, std, edges.move.kernel.log_prob)
            replayed.sum().backward()
            drift = max(drift, (replayed - edges.log_prob).abs().max().item())
            log_probs.append(edges.log_prob)
    numbers = (tree.samples[0], torch.cat(log_probs), policy.decode(tree.samples, ROWS))
    return numbers, drift, [p.grad for p in weights.parameters]


def blocks_computed(policy, computed):
    """Note every forward of the first transformer block."""
    block = next(iter(policy.pipe.transformer.transformer_blocks))
    block.register_forward_pre_hook(lambda *_: computed.append(torch.is_grad_enabled()))


@pytest.mark.parametrize("name", ["sd3_guided", "flux"])
def test_checkpointing_changes_no_number(name):
    plain, policy, computed = trained(policy_of(name)), policy_of(name), []
    switches.checkpoint_gradients(policy.modules.values())
    blocks_computed(policy, computed)
    numbers, drift, gradients = trained(policy)
    assert all(torch.equal(a, b) for a, b in zip(numbers, plain[0], strict=True))
    assert drift == 0.0
    for a, b in zip(gradients, plain[2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert computed.count(True) == 2 * 3  # three replays, each computed again on the way back


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_an_offloaded_vae_computes_the_same(name):
    plain, policy = trained(policy_of(name)), policy_of(name)
    before = policy.pipe.vae.config, policy.pipe.vae.dtype, policy.pipe.device
    switches.offload(policy.pipe.vae, policy.pipe.device)
    numbers, drift, _ = trained(policy)
    assert all(torch.equal(a, b) for a, b in zip(numbers, plain[0], strict=True))
    assert drift == 0.0
    assert (policy.pipe.vae.config, policy.pipe.vae.dtype, policy.pipe.device) == before
    picture = torch.rand(1, 3, 16, 16)
    own, stock = (pipe.vae.encode(picture).latent_dist.mean for pipe in (policy.pipe, tiny.PIPELINES[name]()))
    assert torch.equal(own, stock)


def test_an_offloaded_vae_visits_the_device_for_its_calls_only(monkeypatch):
    vae, journeys = tiny.autoencoder(4), []
    monkeypatch.setattr(vae, "to", lambda device: journeys.append(torch.device(device).type))
    monkeypatch.setattr(vae, "decode", lambda latents: journeys.append("decode") or latents)
    monkeypatch.setattr(vae, "encode", lambda picture: 1 / 0)
    switches.offload(vae, torch.device("cuda"))
    assert journeys == ["cpu"]
    vae.decode(torch.zeros(1))
    assert journeys == ["cpu", "cuda", "decode", "cpu"]
    with pytest.raises(ZeroDivisionError):
        vae.encode(torch.zeros(1))
    assert journeys[-1] == "cpu"


def test_tiling_changes_pictures_and_nothing_else():
    policies = [policy_of("sd3"), policy_of("sd3")]
    for policy in policies:
        policy.pipe.vae.tile_latent_min_size, policy.pipe.vae.tile_sample_min_size = 4, 8
    switches.tile(policies[1].pipe)
    (plain, _, _), (tiled, drift, _) = map(trained, policies)
    assert torch.equal(plain[0], tiled[0])
    assert torch.equal(plain[1], tiled[1])
    assert drift == 0.0
    assert not torch.equal(plain[2], tiled[2])


@pytest.mark.parametrize("backend", ["_native_math", "_native_flash"])
def test_an_exact_attention_gives_the_same_numbers(backend):
    plain, policy, active = (
        trained(policy_of("flux")),
        policy_of("flux"),
        _AttentionBackendRegistry.get_active_backend(),
    )
    attention.set_attention(policy.modules.values(), backend)
    processors = policy.pipe.transformer.attn_processors.values()
    assert {processor._attention_backend.value for processor in processors} == {backend}
    assert _AttentionBackendRegistry.get_active_backend() == active  # for other models of the process
    numbers, drift, gradients = trained(policy)
    for a, b in zip((*numbers, *gradients), (*plain[0], *plain[2]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert drift == 0.0


def test_attention_names_are_those_of_diffusers_that_do_not_quantise():
    everything = {backend.value for backend in AttentionBackendName}
    assert set(typing.get_args(backends.AttentionBackend)) == {name for name in everything if "sage" not in name}


def compiling(policy):
    """Compile without a compiler, and note what was handed to it."""
    graphs = []
    switches.compile_blocks(policy.modules.values(), lambda graph, inputs: graphs.append(graph) or graph)
    return graphs


def test_compiled_blocks_compute_the_same_in_place():
    plain, policy = trained(policy_of("flux")), policy_of("flux")
    transformer = policy.pipe.transformer
    block, graphs = transformer.transformer_blocks[0], compiling(policy)
    numbers, drift, gradients = trained(policy)
    assert graphs
    assert policy.pipe.transformer is transformer is policy.modules["transformer"]
    assert transformer.transformer_blocks[0] is block
    for a, b in zip((*numbers, *gradients), (*plain[0], *plain[2]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert drift == 0.0


def test_a_class_that_names_no_blocks_is_compiled_too():
    plain, policy = policy_of("sd3"), policy_of("sd3")
    blocks, graphs = list(policy.pipe.transformer.transformer_blocks), compiling(policy)
    assert not policy.pipe.transformer._repeated_blocks
    with torch.no_grad():
        velocities = [p.velocity(p.start(ROWS[:1]), p.sigmas[0], ROWS[:1])[0] for p in (plain, policy)]
    torch.testing.assert_close(*velocities, rtol=1e-5, atol=1e-5)
    assert graphs
    assert list(policy.pipe.transformer.transformer_blocks) == blocks


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "model.attention=sage",
            "model.attention: 'sage' quantises, so the log-probs of a rollout would not be the model's; ",
        ),
        ("model.attention=_sage_qk_int8_pv_fp16_cuda", "model.attention: '_sage_qk_int8_pv_fp16_cuda' quantises"),
        ("model.attention=_native_mth", "model.attention: '_native_mth' is not allowed, did you mean '_native_math'?"),
        ("model.guidance=non", "model.guidance: 'non' is not allowed, did you mean 'none'?"),
        ("model.vae=free", "model.vae: 'free' is not allowed, choose one of keep, offload"),
        (
            "model.gradient_checkpoint=true",
            "model.gradient_checkpoint: unknown key, did you mean 'gradient_checkpointing'?",
        ),
    ],
)
def test_a_wrong_switch_is_refused_in_the_config(workplace, override, said):
    with pytest.raises(InputError) as caught:
        config.load("tiny.yaml", [override])
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            {"model.attention": "flash"},
            "model.attention: flash cannot train in float32 on cpu here .*install `flash-attn",
        ),
        ({"model.attention": "flex"}, "model.attention: flex cannot train in float32 on cpu here .*backward on CPU"),
        ({"model.attention": "native"}, "SD3Transformer2DModel has its attention fixed to PyTorch's own"),
        (
            {"model.compile": True},
            "model.compile: PyTorch compiles for cpu with no-such-compiler, which is not installed",
        ),
    ],
)
def test_what_does_not_work_here_is_refused_at_load(workplace, monkeypatch, overrides, said):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match=said):
        setup.policy_and_weights(config.load("tiny.yaml", overrides), CPU)


def test_a_lossy_attention_of_the_environment_is_refused(workplace, monkeypatch):
    monkeypatch.setattr(setup, "DIFFUSERS_ATTN_BACKEND", "sage")
    with pytest.raises(InputError, match="DIFFUSERS_ATTN_BACKEND: 'sage' quantises"):
        setup.policy_and_weights(config.load("tiny.yaml"), CPU)


def test_networks_without_what_a_switch_needs_are_refused():
    with pytest.raises(
        InputError, match="gradient_checkpointing: TransformerTemporalModel does not support it, set it to false"
    ):
        switches.checkpoint_gradients(
            [TransformerTemporalModel(num_attention_heads=1, attention_head_dim=32, in_channels=32)]
        )
    pipe = tiny.sd3()
    del pipe.vae.use_tiling
    with pytest.raises(InputError, match="model.vae_tiling: AutoencoderKL has no tiling"):
        switches.tile(pipe)


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


@pytest.mark.parametrize(
    ("pipeline", "embedded", "off"),
    [
        ("FluxPipeline", True, {"true_cfg_scale": 1.0}),
        ("Flux2Pipeline", True, {}),
        ("HunyuanVideoPipeline", True, {"true_cfg_scale": 1.0}),
        ("QwenImagePipeline", False, {"true_cfg_scale": 1.0}),
        ("StableDiffusion3Pipeline", False, {"guidance_scale": 1.0}),
        ("AuraFlowPipeline", False, {"guidance_scale": 1.0}),
        ("WanPipeline", False, {"guidance_scale": 1.0, "guidance_scale_2": None}),
        ("ZImagePipeline", False, {"guidance_scale": 0.0}),
        ("Krea2Pipeline", False, {"guidance_scale": 0.0}),
        (
            "LTX2Pipeline",
            False,
            {
                "guidance_scale": 1.0,
                "audio_guidance_scale": 1.0,
                "stg_scale": 0.0,
                "audio_stg_scale": 0.0,
                "modality_scale": 1.0,
                "audio_modality_scale": 1.0,
            },
        ),
    ],
)
def test_guidance_is_switched_off_as_each_pipeline_understands_it(pipeline, embedded, off):
    found = guidance.unguided(getattr(diffusers, pipeline), embedded)
    assert found.pop("negative_prompt", None) is None
    assert found == off


def test_without_guidance_one_branch_is_trained_and_two_are_evaluated(workplace):
    overrides = {"model.guidance": "none", "model.call.guidance_scale": 3.0, "model.text_encoders": "free"}
    done = run.train("tiny.yaml", overrides)
    train = [line for line in done.metrics if line["phase"] == "train"]
    held_out = [line for line in done.metrics if line["phase"] == "eval"]
    assert [line["cost/rollout_evaluations"] for line in train] == [8 * 4] * 2  # samples x steps
    assert [line["cost/model_evaluations"] for line in held_out] == [3 * 4 * 2] * 3
    assert [line["policy/max_abs_log_ratio"] for line in train] == [0.0] * 2
    assert done.policy.call["guidance_scale"] == 3.0

    guided = run.train("tiny.yaml", {**overrides, "model.guidance": "pipeline", "run.name": "guided"}).metrics
    assert guided[0]["reward/mean"] == held_out[0]["reward/mean"]  # before training
    assert guided[1]["cost/rollout_evaluations"] == 8 * 4 * 2


def test_a_guidance_that_no_argument_switches_off_is_refused():
    with pytest.raises(InputError, match=r"model.guidance: StableDiffusion3Pipeline .*evaluates 2 branches"):
        guidance.check_unguided(policy_of("sd3_guided"), ROWS)


def test_a_run_with_the_exact_switches_is_the_plain_run(workplace):
    chosen = {"model.gradient_checkpointing": True, "model.vae": "offload", "model.vae_tiling": True}
    plain, switched = run.train("tiny.yaml"), run.train("tiny.yaml", {**chosen, "run.name": "switched"})
    assert switched.policy.pipe.transformer.gradient_checkpointing
    assert switched.policy.pipe.vae.use_tiling
    for a, b in zip(plain.metrics, switched.metrics, strict=True):
        assert a["reward/mean"] == b["reward/mean"]
        if a["phase"] == "train":
            assert a["policy/grad_norm"] == pytest.approx(b["policy/grad_norm"], rel=1e-6)
            assert a["policy/max_abs_log_ratio"] == b["policy/max_abs_log_ratio"] == 0.0
