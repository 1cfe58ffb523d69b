"""A pipeline gives the same in slices of its schedule as in one run."""

import inspect
import logging
import sys
from dataclasses import replace

import pytest
import tiny
import torch
from diffusers import StableDiffusion3Pipeline
from zoo import SPECIMENS

from flowgrpo.data.prompts import Row
from flowgrpo.flow.pipeline.denoising_loop import DenoisingLoop

ROWS = [Row("a red circle", 3), Row("a green circle", 4)]


@pytest.mark.parametrize("name", tiny.PIPELINES)
@torch.no_grad()
def test_slices_of_any_length_add_up_to_the_whole_run(name):
    walk = DenoisingLoop(tiny.PIPELINES[name](), tiny.CALLS[name])
    whole = walk.generate(ROWS)
    state = walk.start(ROWS)
    for steps in (range(1), range(1, len(walk.sigmas) - 1)):
        state = (walk.run_slice(ROWS, steps, state)[1][-1].next_sample,)
    assert torch.equal(walk.decode(state, ROWS, by_landing=False), whole)
    assert torch.equal(walk.decode(state, ROWS, by_landing=True), whole)


@torch.no_grad()
def test_only_steps_that_are_not_for_decoding_or_finding_out_are_counted():
    walk = DenoisingLoop(tiny.sd3(), tiny.CALLS["sd3"])
    state = walk.start(ROWS)
    assert walk.evaluations == 0
    walk.velocity(state, walk.sigmas[1], ROWS)
    assert walk.evaluations == 2
    walk.decode(state, ROWS, by_landing=True)
    with walk.uncounted():
        walk.velocity(state, walk.sigmas[1], ROWS)
    assert walk.evaluations == 2


def test_a_call_that_failed_keeps_nothing_of_its_steps(monkeypatch):
    walk = DenoisingLoop(tiny.sd3(), tiny.CALLS["sd3"])
    state, step = walk.start(ROWS), walk.scheduler.step

    def full(*arguments, **options):
        step(*arguments, **options)
        assert walk.scheduler.history
        raise torch.OutOfMemoryError

    monkeypatch.setattr(walk.scheduler, "step", full)
    with pytest.raises(torch.OutOfMemoryError):
        walk.run_slice(ROWS, range(1), state)
    assert not walk.scheduler.history


def test_what_autocast_copies_of_weights_is_not_kept_until_the_call_ends():
    walk, seen = DenoisingLoop(tiny.sd3(), tiny.CALLS["sd3"], autocast=torch.bfloat16), set()
    walk.pipe.transformer.register_forward_pre_hook(
        lambda *_: seen.add((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
    )
    walk.velocity(walk.start(ROWS), walk.sigmas[0], ROWS)
    assert seen == {(True, False)}


def test_draws_past_the_generators_are_the_same_each_time_and_leave_no_trace():
    walk = DenoisingLoop(tiny.sd3(), tiny.CALLS["sd3"])
    state, drawn = walk.start(ROWS), []
    walk.pipe.transformer.register_forward_pre_hook(lambda *_: drawn.append(float(torch.rand(()))))
    before = torch.get_rng_state()
    for _ in range(2):
        walk.velocity(state, walk.sigmas[0], ROWS)
    assert drawn[0] == drawn[-1]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_row_that_could_not_be_encoded_leaves_no_list_of_shapes_behind(monkeypatch):
    walk = DenoisingLoop(tiny.sd3(), tiny.CALLS["sd3"])
    state = walk.start(ROWS)
    with monkeypatch.context() as patch:
        patch.setattr(walk, "run_slice", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            walk.encode(Row("two blue square", 5))
    walk.velocity(state, walk.sigmas[1], ROWS)
    assert walk.embeddings.seen is None


def draws(walk, monkeypatch):
    """Shapes of the latents that the pipeline draws in a step from another state than it drew first, and the velocity."""
    drawn, module = [], sys.modules[type(walk.pipe).__module__]
    real = module.randn_tensor
    with monkeypatch.context() as patch:
        patch.setattr(module, "randn_tensor", lambda shape, **given: drawn.append(shape) or real(shape, **given))
        state = walk.start([replace(row, seed=row.seed + 9) for row in ROWS])
        assert drawn
        drawn.clear()
        (velocity,) = walk.velocity(state, walk.sigmas[1], ROWS)
    return drawn, velocity


@pytest.mark.parametrize("name", ["sd3_guided", "flux"])
@torch.no_grad()
def test_a_step_draws_no_latents_where_the_call_takes_some(name, monkeypatch):
    walk = DenoisingLoop(tiny.PIPELINES[name](), tiny.CALLS[name])
    none, velocity = draws(walk, monkeypatch)
    assert not none
    assert [slot.argument for slot in walk.latents.slots] == ["latents"]
    walk.latents.slots = [replace(slot, argument=None) for slot in walk.latents.slots]
    some, expected = draws(walk, monkeypatch)
    assert len(some) == 1
    assert torch.equal(velocity, expected)


@torch.no_grad()
def test_what_a_pipeline_draws_to_decode_is_what_it_draws_in_its_own_run():
    specimen = SPECIMENS["LTXPipeline"]
    call = {**specimen.call, "guidance_scale": 1.0, "decode_timestep": 0.05, "decode_noise_scale": 0.1}
    walk = DenoisingLoop(specimen.build(vae={"timestep_conditioning": True}), call)
    state = walk.start(ROWS)
    assert [slot.argument for slot in walk.latents.slots] == ["latents"]
    whole, last = walk.generate(ROWS), range(len(walk.sigmas) - 1)
    assert torch.equal(walk.generate(ROWS, state), whole)
    end = walk.run_slice(ROWS, last, state)[1][-1].next_sample
    assert torch.equal(walk.decode((end,), ROWS, by_landing=False), whole)


@torch.no_grad()
def test_another_call_is_looked_at_once():
    walk, calls = DenoisingLoop(tiny.sd3(), tiny.CALLS["sd3"]), []
    walk.start(ROWS)
    walk.pipe.transformer.register_forward_pre_hook(lambda *_: calls.append(1))
    for first in (True, False):
        calls.clear()
        with walk.call_overrides(num_inference_steps=2):
            state = walk.start(ROWS)
            assert bool(calls) == first
            assert walk.velocity(state, walk.sigmas[1], ROWS)[0].shape == state[0].shape
    walk.start(ROWS)
    walk.take_networks()
    with walk.call_overrides(num_inference_steps=2):
        calls.clear()
        walk.start(ROWS)
        assert calls


@pytest.mark.parametrize("told", ["another velocity", "another condition", "an error", "a warning"])
@torch.no_grad()
def test_a_pipeline_that_makes_something_else_of_its_latents_draws_them(told, monkeypatch):
    class Pipeline(StableDiffusion3Pipeline):
        def prepare_latents(self, *args, **kwargs):
            made = super().prepare_latents(*args, **kwargs)
            if args[-1] is None and kwargs.get("latents") is None:
                return made, torch.zeros(1)
            if told == "an error":
                raise ValueError("of no use")
            if told == "a warning":
                logging.getLogger("diffusers.pipelines").warning("of some use")
            if told == "another velocity":
                self.transformer.pos_embed.proj.bias += 1
            return made, torch.full((1,), float(told == "another condition"))

        def __call__(self, *args, **kwargs):
            own, self.prepare_latents = self.prepare_latents, lambda *a, **k: own(*a, **k)[0]
            try:
                return inspect.unwrap(StableDiffusion3Pipeline.__call__)(self, *args, **kwargs)
            finally:
                self.prepare_latents = own

        __call__.__signature__ = inspect.signature(StableDiffusion3Pipeline.__call__)

    walk = DenoisingLoop(Pipeline(**tiny.sd3().components), tiny.CALLS["sd3"])
    walk.start(ROWS)
    assert [slot.argument for slot in walk.latents.slots] == [None]
