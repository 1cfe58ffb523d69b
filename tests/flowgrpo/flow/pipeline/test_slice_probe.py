"""How a pipeline runs in slices is found by looking at it, in whichever order its rows come."""

from dataclasses import replace

import pytest
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
    assert len(policy.generate(specimen.rows)) == len(specimen.rows)


@pytest.mark.parametrize("given", [{}, pytest.param({"image_cond_noise_scale": 0.3}, marks=pytest.mark.zoo)])
def test_a_number_of_the_pipelines_own_that_a_step_alone_cannot_follow_is_named(given):
    """LTX draws noise for its picture before each step, by a default that no config names."""
    specimen = SPECIMENS["LTXConditionPipeline"]
    call = {k: v for k, v in specimen.call.items() if k != "image_cond_noise_scale"} | given
    policy = DiffusersPolicy(specimen.build(), call)
    with pytest.raises(InputError, match=r"^model.call.image_cond_noise_scale: .* set it to 0$"):
        policy.check(specimen.rows)
