"""What an engine is asked for, and what of a run is refused before it is asked."""

import diffusers
import pytest

from flowgrpo import config
from flowgrpo.data.prompts import Prompt, Row
from flowgrpo.errors import InputError
from flowgrpo.schema.engine import Engine
from flowgrpo_engine.flow import request
from samplers.kernels import Kernel
from samplers.plans import branch, chain
from samplers.trees import Root

SD3, FLUX, QWEN = diffusers.StableDiffusion3Pipeline, diffusers.FluxPipeline, diffusers.QwenImagePipeline
WAN = diffusers.WanPipeline
SIZES = {"num_inference_steps": 10, "height": 512, "width": 384}
KERNEL = Kernel("flow_sde", 0.7)


def settings(**overrides):
    """A config that can be rolled out, with others of its values; `__` is a dot."""
    written = {"model": {"path": "some/model", "call": dict(SIZES)}, "run": {"engine": {}}}
    for key, value in overrides.items():
        config._set(written, key.replace("__", "."), value)
    return config.validate(written)


def test_a_chain_and_a_window_can_be_rolled_out():
    request.check(settings(), SD3, [Prompt("a", {"class": "x", "image": None, "negative_prompt": "b"})])
    request.check(settings(algorithm={"preset": "flow_grpo_fast"}), SD3)
    request.check(settings(algorithm__kernel="cps", model__call={"height": 64, "width": 64, "guidance_scale": 2}), SD3)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            {"run__context_parallel": 2, "run__processes": 2},
            "run.context_parallel: .* set it to 1, or set run.engine=null",
        ),
        ({"run__staleness": 1}, "run.staleness: .* set it to 0"),
        ({"run__generators": 1, "run__processes": 2}, "run.generators: .* set it to 0"),
        ({"run__sharding": "fsdp2"}, "run.sharding: .* set it to none"),
        ({"model__lora": None}, "model.lora: an engine gets adapters, not whole networks; give it a rank"),
        (
            {"train__draft": {"pool": 2}},
            "train.draft: an engine draws its own starts, so no draft can choose them; set it to null",
        ),
        (
            {"algorithm": {"preset": "dance_grpo"}},
            "algorithm.tree.start: an engine draws a new start for each sample; take independent",
        ),
        (
            {"algorithm__kernel": "dance_sde"},
            "algorithm.kernel: an engine cannot sample with dance_sde; take flow_sde or cps",
        ),
        ({"algorithm__kernel": "manifold"}, "algorithm.kernel: an engine cannot sample with manifold"),
        (
            {"algorithm__kernel": {"name": "flow_sde", "calibrate": {}}, "algorithm__tree": "twigs"},
            "algorithm.kernel.calibrate: an engine has one noise level for all steps; set it to null",
        ),
        (
            {"model__call": {**SIZES, "max_sequence_length": 256}},
            "model.call.max_sequence_length: an engine takes no such argument in a request; start the engine with "
            "the same value and add it to run.engine.untold, or set run.engine=null",
        ),
        (
            {"model__call": {**SIZES, "guidance_scale_2": 2.0}},
            "model.call.guidance_scale_2: an engine takes no such argument",
        ),
        (
            {"run__engine__log_probs": True},
            "run.engine.log_probs: an engine of a flow model always returns them; remove it",
        ),
        ({"run__engine__untold": ["hight"]}, "run.engine.untold: 'hight' is not in model.call, .*height"),
        (
            {"model__call": {"num_inference_steps": 4, "width": 64}},
            "model.call.height: an engine needs it; give a number",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused_in_a_sentence(overrides, said):
    with pytest.raises(InputError, match=f"^{said}"):
        request.check(settings(**overrides), SD3)


def test_conditions_are_refused():
    with pytest.raises(InputError, match="^prompts.train: an engine does not use the column image; remove it"):
        request.check(settings(), diffusers.QwenImageEditPipeline, [Prompt("a", {"image": "fox.png"})])


def test_untold_arguments_of_a_call_are_allowed_and_left_out():
    call = {**SIZES, "max_sequence_length": 256}
    request.check(settings(model__call=call, run__engine__untold=["max_sequence_length"]), SD3)
    told = request.call_of(
        SD3, {**call, "guidance_scale": 1.0}, distilled=False, untold=["max_sequence_length", "width"]
    )
    assert told == {"num_inference_steps": 10, "height": 512, "guidance_scale": 1.0}


@pytest.mark.parametrize(
    ("pipeline", "call", "distilled", "told"),
    [
        (SD3, {"guidance_scale": 4.5}, False, {"guidance_scale": 4.5, "negative_prompt": ""}),
        (SD3, {}, False, {"guidance_scale": 7.0, "negative_prompt": ""}),  # the default of its class
        (SD3, {"guidance_scale": 1.0, "negative_prompt": "x"}, False, {"guidance_scale": 1.0}),
        (FLUX, {"guidance_scale": 3.5}, True, {"guidance_scale": 1.0, "true_cfg_scale": 1.0}),
        (QWEN, {"true_cfg_scale": 4.0}, False, {"guidance_scale": 1.0, "true_cfg_scale": 1.0}),  # of diffusers, too
        (
            QWEN,
            {"true_cfg_scale": 4.0, "negative_prompt": " "},
            False,
            {"guidance_scale": 4.0, "true_cfg_scale": 4.0, "negative_prompt": " "},
        ),
        (WAN, {"num_frames": 9}, False, {"guidance_scale": 5.0, "negative_prompt": "", "num_frames": 9}),
    ],
)
def test_guidance_is_told_as_an_engine_understands_it(pipeline, call, distilled, told):
    assert request.call_of(pipeline, SIZES | call, distilled=distilled, untold=[]) == SIZES | told


class AddsGuidance:
    do_classifier_free_guidance = property(lambda self: self._guidance_scale > 0)

    def __call__(self, height, width, num_inference_steps=5, guidance_scale=0.5):
        """Guide at any scale above 0."""


def test_guidance_of_another_kind_is_refused():
    with pytest.raises(InputError, match="^run.engine: AddsGuidance applies guidance in another way than an engine"):
        request.call_of(AddsGuidance, SIZES, distilled=False, untold=[])


def test_steps_are_those_of_the_plan_and_states_those_around_trained_ones():
    steps = request.steps_of(chain([KERNEL] * 6, [1, 2, 4], [2, 4]), 6)
    assert (steps.kernel, steps.stochastic, steps.trained, steps.returned) == (KERNEL, [1, 2, 4], [2, 4], [2, 3, 4, 5])


def test_trees_and_levels_of_their_own_are_refused():
    options = {"stochastic": range(3), "trained": range(3), "sibling_strength": None, "noise_scale": 1.0}
    with pytest.raises(
        InputError, match="^algorithm.tree: an engine samples chains without branches; take chain or window"
    ):
        request.steps_of(branch([KERNEL] * 4, [1], 2, **options), 4)
    with pytest.raises(
        InputError, match="^algorithm.kernel.level: an engine has one noise level for all steps; give one level"
    ):
        request.steps_of(chain([KERNEL, Kernel("flow_sde", 0.5)] * 2, [0, 1], [0, 1]), 4)
    with pytest.raises(
        InputError, match="^algorithm.tree: an engine samples chains without branches; take chain or window"
    ):
        request.check(settings(algorithm__tree="branch"), SD3)
    with pytest.raises(
        InputError, match="^algorithm.kernel.level: an engine has one noise level for all steps; give one level"
    ):
        request.check(settings(algorithm__kernel={"name": "flow_sde", "level": [0.7, 0.5] * 5}), SD3)


def test_a_sigma_that_is_1_to_us_and_not_to_an_engine_is_refused_where_a_step_is_stochastic():
    sigmas = [0.9995, 0.7, 0.5, 0.2, 0.0]
    with pytest.raises(
        InputError,
        match="^algorithm.tree.steps: step 0 begins at sigma 0.9995, which counts as 1 here but not in an engine",
    ):
        request.check_sigmas(request.steps_of(chain([KERNEL] * 4, [0, 1], [0, 1]), 4), sigmas)
    request.check_sigmas(request.steps_of(chain([KERNEL] * 4, [1], [1]), 4), sigmas)
    request.check_sigmas(request.steps_of(chain([KERNEL] * 4, [0, 1], [1]), 4), [1.0, *sigmas[1:]])


def test_samples_of_a_group_share_requests_of_neighbouring_seeds():
    steps = request.steps_of(chain([KERNEL] * 4, [1], [1]), 4)
    places = [(1, 3), (0, 0), (0, 1), (0, 2), (0, 4), (1, 2)]
    roots = [Root(g, i, Row("ab"[g], 100 * g + i)) for g, i in places]
    found = request.requests_of(roots, steps, lambda row: {"height": 8}, Engine(samples=2, options={"fps": 3}))
    told = [([places[i] for i in own], r["prompt"], r["seed"], r["num_outputs_per_prompt"]) for own, r in found]
    assert told == [
        ([(0, 0), (0, 1)], "a", 0, 2),
        ([(0, 2)], "a", 2, 1),
        ([(0, 4)], "a", 4, 1),
        ([(1, 2), (1, 3)], "b", 102, 2),
    ]
    assert all(r["height"] == 8 and r["extra_sampling_params"] == {"fps": 3} for _, r in found)
    assert len(request.requests_of(roots, steps, lambda row: {}, Engine())) == 3


def test_the_form_and_the_kernel_are_told():
    def asked(kernel):
        steps = request.steps_of(chain([kernel] * 4, [1], [1]), 4)
        ((_, told),) = request.requests_of([Root(0, 0, Row("a", 1))], steps, lambda row: {}, Engine())
        return [told[f"rollout_{key}"] for key in ("sde_type", "noise_level", "log_prob_no_const")]

    assert asked(Kernel("flow_sde", 0.7, "mean")) == ["sde", 0.7, False]
    assert asked(Kernel("flow_sde", 0.7, "sum")) == ["sde", 0.7, False]
    assert asked(Kernel("cps", 0.8, "constant_free")) == ["cps", 0.8, True]
