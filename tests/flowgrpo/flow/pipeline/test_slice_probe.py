"""How a pipeline runs in slices is found by looking at it, in whichever order its rows come."""

from dataclasses import replace

import pytest
import tiny
import torch
from cases import cases
from zoo import SPECIMENS

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.batching import Capabilities
from flowgrpo.flow.pipeline.denoising_loop import DenoisingLoop
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.flow.pipeline.slice_probe import probe, probe_batching


def policy_of(name):
    return DiffusersPolicy(SPECIMENS[name].build(), SPECIMENS[name].call)


KINDS = [("Kandinsky5I2VPipeline", 1), ("BriaFiboPipeline", 1), ("OmniGenPipeline", 1), ("FluxPipeline", None)]
PLAIN = [(*kind, checked) for kind, checked in zip(KINDS, (False, True, True, False), strict=True)]


@pytest.mark.parametrize(
    ("name", "max_batch", "checked"), cases([(*kind, checked) for kind in KINDS for checked in (False, True)], PLAIN)
)
def test_samples_of_a_group_are_what_they_are_alone(name, max_batch, checked):
    specimen, policy = SPECIMENS[name], policy_of(name)
    long, _, short = specimen.rows
    if checked:
        policy.check([long, short])  # as a run does, with the longest and the shortest prompt
    group = [long, Row(long.prompt, 7, long.columns), short]
    together = policy.generate(group)
    assert policy.capabilities.max_batch == max_batch
    for row, sample in zip(group, together, strict=True):
        torch.testing.assert_close(policy.generate([row])[0], sample, rtol=0, atol=1e-4 * float(sample.std()))


@pytest.mark.parametrize(("name", "lands"), [("HunyuanVideoImageToVideoPipeline", True), ("LTXPipeline", False)])
def test_decoding_lands_only_where_the_loop_does_what_decoding_needs(name, lands):
    policy, row = policy_of(name), SPECIMENS[name].rows[0]
    policy.check([row])
    assert policy.capabilities.decodes_by_landing == lands
    before = policy.evaluations
    policy.decode(policy.start([row]), [row])
    assert policy.evaluations == before


@pytest.mark.parametrize(
    ("name", "travels"), [("LTXImageToVideoPipeline", False), ("LTXPipeline", True), ("ZImageImg2ImgPipeline", True)]
)
def test_steps_share_a_call_only_where_each_has_the_velocity_that_it_has_alone(name, travels):
    """After a step LTX's loop for pictures has its state in another layout, and bfloat16 rounds otherwise there.

    Z-Image's asserts that a step's result is float32, also where its state is not.
    """
    pipe, row = SPECIMENS[name].build(), SPECIMENS[name].rows[0]
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.to(torch.bfloat16)
    policy = DiffusersPolicy(pipe, SPECIMENS[name].call)
    policy.check([row])
    assert policy.capabilities.travels == travels
    at, met = [policy.start([row])], []

    def onward(velocity):
        met.append((at[-1], velocity))
        at.append((at[-1][0] - 0.25 * velocity[0],))
        return at[-1]

    with torch.no_grad():
        policy.travel(at[0], range(3), [row], onward)
        for step, (state, (velocity,)) in enumerate(met):
            assert torch.equal(velocity, policy.velocity(state, policy.sigmas[step], [row])[0])
    assert len(met) == 3


def test_a_call_of_one_step_takes_no_open_calls_from_others():
    policy, row = policy_of("FluxPipeline"), SPECIMENS["FluxPipeline"].rows[0]
    with policy.call_overrides(num_inference_steps=1):
        policy.check([row])
    assert policy.capabilities.travels


def test_what_was_found_is_only_ever_tightened():
    specimen = SPECIMENS["FluxPipeline"]
    walk = DenoisingLoop(specimen.build(), specimen.call)
    loosest, tightest = Capabilities(), Capabilities(pads_prompts=False, max_batch=1, decodes_by_landing=True)
    assert probe(walk, specimen.rows, "model.call", loosest) == loosest
    assert probe(walk, specimen.rows, "model.call", tightest) == tightest
    assert probe_batching(walk, specimen.rows, replace(loosest, pads_prompts=False)).pads_prompts is False


def test_rows_of_unequal_size_or_schedule_are_refused_with_a_sentence():
    policy = policy_of("FluxPipeline")
    row = SPECIMENS["FluxPipeline"].rows[0]
    with pytest.raises(InputError, match="latents of unequal shapes"):
        policy.start([row, Row(row.prompt, 2, {"height": 32})])
    policy = policy_of("FluxPipeline")
    with pytest.raises(InputError, match="asks for another schedule"):
        policy.start([row, Row(row.prompt, 2, {"num_inference_steps": 9})])


@pytest.mark.parametrize(
    ("name", "size", "fault"),
    [
        ("FluxPipeline", {"height": 18}, r"model\.call\.height: 18 is not a multiple of 4; take 16 or 20"),  # it warns
        (
            "StableDiffusion3Pipeline",
            {"width": 3},
            r"model\.call\.width: 3 is not a multiple of 4; take 4",
        ),  # it raises
    ],
)
def test_a_size_that_the_pipeline_cannot_take_is_refused_with_the_nearest(name, size, fault):
    policy, row = policy_of(name), SPECIMENS[name].rows[0]
    with policy.call_overrides(**size), pytest.raises(InputError, match=f"^{fault}$"):
        policy.prepare([row])


def test_a_pipeline_that_never_gives_a_number_is_named(monkeypatch):
    policy, row = policy_of("FluxPipeline"), SPECIMENS["FluxPipeline"].rows[0]
    with torch.no_grad():
        policy.pipe.transformer.proj_out.weight.fill_(torch.nan)
    with pytest.raises(InputError, match="model.dtype: the final latents of FluxPipeline are not finite"):
        policy.check([row])


def test_rows_that_may_share_a_step_and_no_decoding_have_calls_of_their_own():
    """SD3 has as many pictures in a call as rows or none, and encodes them wherever it is not given the state."""
    specimen = SPECIMENS["StableDiffusion3Img2ImgPipeline"]
    policy = DiffusersPolicy(specimen.build(), specimen.call)
    policy.check(specimen.rows)
    assert policy.capabilities.max_batch == 1
    policy.check(specimen.rows)  # again, as the call of an evaluation
    assert policy.capabilities.max_batch == 1
    assert len(policy.generate(specimen.rows)) == len(specimen.rows)


@pytest.mark.parametrize("given", [{}, pytest.param({"image_cond_noise_scale": 0.3}, marks=pytest.mark.zoo)])
def test_a_number_of_the_pipelines_own_that_a_step_alone_cannot_follow_is_named(given):
    """LTX draws noise for its picture before each step, by a default that no config names."""
    specimen = SPECIMENS["LTXConditionPipeline"]
    call = {k: v for k, v in specimen.call.items() if k != "image_cond_noise_scale"} | given
    policy = DiffusersPolicy(specimen.build(), call)
    with pytest.raises(InputError, match=r"^model.call.image_cond_noise_scale: .* set it to 0$"):
        policy.check(specimen.rows)


def levels_of(policy, row):
    """Three rows with seeds of their own, their states, and sigmas in the schedule and beside it."""
    rows = [replace(row, seed=i) for i in range(3)]
    return policy.start(rows), torch.tensor([policy.sigmas[1], 0.35, policy.sigmas[0]]), rows


@pytest.mark.parametrize("name", ["sd3", "flux"])
@torch.no_grad()
def test_rows_at_levels_of_their_own_have_the_velocity_that_they_have_alone(name, caplog):
    policy, row = DiffusersPolicy(tiny.PIPELINES[name](), tiny.CALLS[name]), Row("a red circle", 3)
    assert policy.mixes_levels([row])
    assert policy.evaluations == 0
    assert not caplog.records
    (state,), sigmas, rows = levels_of(policy, row)
    (together,) = policy.velocity((state,), sigmas, rows)
    assert policy.evaluations == 3
    for i, sigma in enumerate(sigmas.tolist()):
        (alone,) = policy.velocity((state[i : i + 1],), sigma, rows[i : i + 1])
        torch.testing.assert_close(together[i : i + 1], alone, rtol=0, atol=1e-5 * float(alone.std()))
    alike = policy.velocity((state,), sigmas[:1].expand(3), rows)
    assert torch.equal(alike[0], policy.velocity((state,), float(sigmas[0]), rows)[0])


def test_rows_of_unequal_levels_and_prompts_that_do_not_pad_are_cut_together():
    policy = DiffusersPolicy(tiny.sd3(), tiny.CALLS["sd3"])
    policy.capabilities, policy._probed = Capabilities(pads_prompts=False, max_batch=2), {False, True}
    (state,), sigmas, rows = levels_of(policy, Row("a red circle", 3))
    seen = []
    policy.pipe.transformer.register_forward_pre_hook(
        lambda _, args, given: seen.append(given["timestep"]), with_kwargs=True
    )
    policy.velocity((state,), sigmas, rows)
    assert [times.tolist() for times in seen] == [(1000 * sigmas[:2]).tolist(), (1000 * sigmas[2:]).tolist()]


@pytest.mark.parametrize("name", ["WanPipeline (2.2)", "Kandinsky5T2IPipeline", "WanPipeline (5B)"])
def test_a_loop_that_decides_by_one_time_or_takes_one_is_found_out(name, caplog):
    """Wan 2.2 chooses between two networks by it, Kandinsky repeats it for each row."""
    policy = policy_of(name)
    with caplog.at_level("INFO"), policy.call_overrides(**policy.unguided()):
        assert not policy.mixes_levels(SPECIMENS[name].rows)
        assert not policy.mixes_levels(SPECIMENS[name].rows)
    assert [record.message.partition(" (")[0] for record in caplog.records] == [
        f"{name.partition(' ')[0]} takes one time a call: noise levels of an update share no calls"
    ]


def test_each_call_has_its_own_answer():
    """Guidance doubles the batch of SD3, with which its times do not grow."""
    policy, row = DiffusersPolicy(tiny.sd3(), tiny.CALLS["sd3_guided"]), Row("a red circle", 3)
    assert not policy.mixes_levels([row])
    with policy.call_overrides(**policy.unguided()):
        assert policy.mixes_levels([row])
    assert not policy.mixes_levels([row])


def test_a_network_that_takes_the_first_time_for_all_rows_is_found_out():
    policy = DiffusersPolicy(tiny.sd3(), tiny.CALLS["sd3"])

    def first(_, args, given):
        return args, given | {"timestep": given["timestep"][:1].expand(len(given["timestep"]))}

    policy.pipe.transformer.register_forward_pre_hook(first, with_kwargs=True)
    assert not policy.mixes_levels([Row("a red circle", 3)])


def test_loops_that_pin_their_state_and_calls_of_one_row_mix_no_levels():
    assert not policy_of("FluxKontextInpaintPipeline").mixes_levels(SPECIMENS["FluxKontextInpaintPipeline"].rows)
    policy = DiffusersPolicy(tiny.sd3(), tiny.CALLS["sd3"])
    policy.capabilities = Capabilities(max_batch=1)
    assert not policy.mixes_levels([])  # nothing is run
