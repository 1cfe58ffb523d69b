"""The weights of the error against numbers of another program, noise levels, the old policy's decay, and guidance."""

import json
import math
import re
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import pytest
import torch
from field import settings, trainer
from gaussian_flow import schedule, velocity
from pydantic import ValidationError

from flowgrpo.config import validate
from flowgrpo.errors import InputError
from flowgrpo.flow.methods import likelihood_rules, presets
from flowgrpo.flow.methods.likelihood import LEAST, Elbo
from flowgrpo.flow.pipeline.velocity_field import FieldPolicy
from flowgrpo.schema.preset_overrides import filled
from flowgrpo.training.weights.old_policies import Decay

SEEN = json.loads((Path(__file__).parents[3] / "data" / "sample_losses.json").read_text())
NAMES = {"adaptive_v": "adaptive_velocity", "ghuber": "power"}  # there and here
SCHEDULE = tuple(schedule())


def errors(own, of="v"):
    """Velocity minus target (4, 3) of the four samples of a case, float64."""
    v, x0, eps = (torch.tensor(own[key], dtype=torch.float64) for key in (of, "x0", "eps"))
    return v - (eps - x0)


@pytest.mark.parametrize("of", ["v", "v_old"])
@pytest.mark.parametrize("there", [name for name in SEEN["elbo"] if name != "exact_released"])
def test_a_weighted_error_is_the_other_program_s(there, of):
    case, told = SEEN["group"], SEEN["elbo"][there]["current" if of == "v" else "old"]
    likelihood = Elbo(weight=NAMES.get(there, there))
    for error, sigma, value in zip(errors(case, of), case["sigma"], told, strict=True):
        assert likelihood.log_prob(error[None], sigma).item() == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("weight", get_args(Elbo.model_fields["weight"].annotation))
def test_a_noise_level_of_each_row_weighs_it_as_it_does_alone(weight):
    """In double precision, also where levels are in single precision."""
    likelihood, sigmas = Elbo(weight=weight, power=0.4), torch.linspace(0.01, 0.99, 99)
    error = torch.randn(99, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    alone = [likelihood.log_prob(own[None], sigma) for own, sigma in zip(error, sigmas.tolist(), strict=True)]
    torch.testing.assert_close(likelihood.log_prob(error, sigmas), torch.cat(alone), rtol=1e-13, atol=0)


@pytest.mark.parametrize("weight", get_args(Elbo.model_fields["weight"].annotation))
def test_the_gradient_of_a_weighted_error_is_the_finite_difference_but_for_what_is_detached(weight):
    likelihood, sigma = Elbo(weight=weight, power=0.4), 0.7
    error = torch.tensor([[0.3, -0.8, 0.1]], dtype=torch.float64)

    def value(moved):
        found = likelihood.log_prob(moved, sigma)
        if not weight.startswith("adaptive"):
            return found
        return found * moved.abs().mean() / error.abs().mean()  # its divisor has no gradient

    leaf = error.clone().requires_grad_()
    (slope,) = torch.autograd.grad(likelihood.log_prob(leaf, sigma).sum(), leaf)
    for i in range(3):
        step = torch.zeros_like(error)
        step[0, i] = 1e-6
        difference = (value(error + step) - value(error - step)) / 2e-6
        assert slope[0, i].item() == pytest.approx(difference.item(), rel=1e-6)


def test_the_mean_error_of_a_gaussian_flow_is_its_closed_form():
    """E over noise of e^2 at x0 = 1.3, by quadrature; and the integral of the true weight is a difference of KLs."""
    told = SEEN["gaussian"]

    def mean_error(sigma, x0=1.3):
        slope, shift = velocity(sigma)
        z = torch.linspace(-9, 9, 4001, dtype=torch.float64)
        density = torch.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
        e = slope * ((1 - sigma) * x0 + sigma * z) + shift - (z - x0)
        return float((density * e**2).sum() * (z[1] - z[0]))

    assert [mean_error(s) for s in SCHEDULE[:9]] == pytest.approx(told["error_at_1.3"], rel=1e-6)
    points = torch.linspace(0.02, 0.98, 961, dtype=torch.float64).tolist()
    exact = Elbo(weight="exact")
    values = [-exact.log_prob(torch.tensor([[mean_error(s) ** 0.5]]).double(), s).item() for s in points]
    weights = [1, *[4, 2] * 479, 4, 1]  # Simpson's
    integral = sum(w * v for w, v in zip(weights, values, strict=True)) * (points[1] - points[0]) / 3
    assert integral == pytest.approx(told["integral"], rel=1e-5)


def test_steps_of_the_schedule_are_drawn_without_repeats_and_by_address():
    likelihood = Elbo()
    drawn = [likelihood.sigmas(SCHEDULE, 7, "here", i) for i in range(200)]
    assert all(len(own) == len(set(own)) == 9 and set(own) < set(SCHEDULE[:-1]) for own in drawn)
    assert drawn == [likelihood.sigmas(SCHEDULE, 7, "here", i) for i in range(200)]
    missing = [next(s for s in SCHEDULE[:-1] if s not in own) for own in drawn]
    assert set(missing) == set(SCHEDULE[:-1])  # any of the ten is left out


def test_strata_are_one_step_of_each_run():
    drawn = [Elbo(draws=3, times="strata", steps=[1, -3]).sigmas(SCHEDULE, i) for i in range(100)]
    seen = [{own[k] for own in drawn} for k in range(3)]
    assert seen == [set(SCHEDULE[1:3]), set(SCHEDULE[3:5]), set(SCHEDULE[5:7])]


def test_densities_cover_what_they_say():
    uniform = [s for i in range(300) for s in Elbo(times="uniform", steps=[2, 6], draws=4).sigmas(SCHEDULE, i)]
    low, high = SCHEDULE[6], SCHEDULE[2]
    assert low < min(uniform) < low + 0.01
    assert high - 0.01 < max(uniform) < high
    assert sum(uniform) / len(uniform) == pytest.approx((low + high) / 2, abs=0.01)
    shifted = sorted(s for i in range(300) for s in Elbo(times="logit_normal", shift=3.0, draws=5).sigmas(SCHEDULE, i))
    median = shifted[len(shifted) // 2]
    assert median == pytest.approx(0.75, abs=0.02)  # of a standard normal's, shifted by 3
    assert min(shifted) >= LEAST
    even = [1000 * s / (3 - 2 * s) for s in shifted]
    assert even == pytest.approx([round(x) for x in even], abs=1e-3)  # of the 1,000 steps of training, before the shift


def test_noise_levels_near_the_data_are_drawn_down_to_a_thousandth_and_a_shift_moves_the_same_draws():
    """Of 3,000 uniform ones the smallest is at 0.0003 on average; of sigmas that a shift presses on 0 none is left below."""
    uniform = [s for i in range(30) for s in Elbo(times="uniform", draws=100).sigmas(SCHEDULE, i)]
    assert 0.001 <= min(uniform) < 0.005
    pressed, plain, shifted = (Elbo(times="logit_normal", shift=by, draws=6).sigmas(SCHEDULE, 1) for by in (1e-9, 1, 4))
    assert pressed == [0.001] * 6
    assert [4 * s / (1 + 3 * s) for s in plain] == pytest.approx(shifted, rel=1e-5)


FOUR = (1.0, 0.75, 0.5, 0.25, 0.0)  # the schedule of a model of four steps


def test_noise_levels_come_from_all_times_or_from_the_deployed_sampler_s_four():
    """One for each of 2,000 samples: t ~ U(0, 1), the same t shifted, or one of the four steps."""
    drawn = {
        kind: [s for i in range(2000) for s in Elbo(draws=1, **options).sigmas(FOUR, "a", i)]
        for kind, options in {
            "uniform": {"times": "uniform"},
            "shifted": {"times": "uniform", "shift": 12.0},
            "grid": {"times": "schedule"},
        }.items()
    }
    tenths = [sum(i / 10 <= s < (i + 1) / 10 for s in drawn["uniform"]) for i in range(10)]
    assert all(abs(count - 200) < 4 * (200 * 0.9) ** 0.5 for count in tenths)
    pairs = [(t, s) for t, s in zip(drawn["uniform"], drawn["shifted"], strict=True) if t > 0.001]
    assert [s for _, s in pairs] == pytest.approx([12 * t / (1 + 11 * t) for t, _ in pairs], rel=1e-5)
    counts = [drawn["grid"].count(s) for s in FOUR[:-1]]
    assert sum(counts) == 2000
    assert all(abs(count - 500) < 4 * (500 * 0.75) ** 0.5 for count in counts)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"draws": 11},
            "draws: 11 without repeats are too many for 10 steps (model.call.num_inference_steps); set "
            "algorithm.likelihood.draws=10",
        ),
        (
            {"steps": [3, 12]},
            "steps: [3, 12] are no range of 10 steps (model.call.num_inference_steps); set algorithm.likelihood.steps=null",
        ),
        (
            {"steps": [4, -6]},
            "steps: [4, -6] are no range of 10 steps (model.call.num_inference_steps); set algorithm.likelihood.steps=null",
        ),
        (
            {"steps": [5, -6], "draws": 12, "times": "strata"},
            "steps: [5, -6] are no range of 10 steps (model.call.num_inference_steps); set algorithm.likelihood.steps=null "
            "algorithm.likelihood.draws=10",
        ),
        (
            {"steps": [1, -7], "draws": 6, "times": "strata"},
            "steps: [1, -7] leave 2 of 10 steps (model.call.num_inference_steps), too few for 6 draws without repeats; set "
            "algorithm.likelihood.steps=null",
        ),
    ],
)
def test_steps_that_a_schedule_has_not_are_refused(options, said):
    with pytest.raises(InputError, match=f"^{re.escape(f'algorithm.likelihood.{said}')}$"):
        Elbo(**options).sigmas(SCHEDULE, 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shift": 2.0}, r"algorithm\.likelihood\.shift: schedule draws the sampler's own sigmas, take times=uniform"),
        (
            {"times": "uniform", "shift": 2.0, "steps": [0, 3]},
            r"\.likelihood\.steps: shifted sigmas are drawn from all",
        ),
        ({"times": "logit_normal", "steps": [0, 3]}, r"\.likelihood\.steps: logit_normal draws from all sigmas"),
    ],
)
def test_options_without_a_meaning_are_refused(options, said):
    with pytest.raises(ValidationError, match=said):
        Elbo(**options)


@pytest.mark.parametrize(
    ("decay", "told"),
    [
        ({}, [0, 0, 0, 0, 0, 0]),
        ({"slope": 0.001, "most": 0.5}, [0, 0.001, 0.074, 0.075, 0.076, 0.5]),
        ({"flat": 75, "slope": 0.0075, "most": 0.999}, [0, 0, 0, 0, 0.0075, 0.999]),
        ({"flat": 10, "slope": 0.01, "most": 0.5}, [0, 0, 0.5, 0.5, 0.5, 0.5]),
        ({"start": 0.25, "slope": 0.005, "most": 0.999}, [0.25, 0.255, 0.62, 0.625, 0.63, 0.999]),
        ({"start": 0.9, "most": 0.9}, [0.9] * 6),
    ],
)
def test_the_decay_of_the_old_policy(decay, told):
    assert [Decay(**decay).at(step) for step in (0, 1, 74, 75, 76, 10_000)] == pytest.approx(told)
    assert Decay(**decay).copies == (not decay)


@pytest.mark.parametrize(
    "decay", [{"slope": 0.1}, {"start": 0.5, "most": 0.4}, {"start": 0.5, "most": 0.5, "slope": 0.1}]
)
def test_a_decay_that_rises_nowhere_is_refused(decay):
    with pytest.raises(ValidationError, match=r"algorithm\.likelihood\.old\.most: .* is no bound of a decay"):
        Decay(**decay)


def test_a_schedule_of_one_or_two_steps_is_drawn_from():
    assert Elbo().sigmas((1.0, 0.0), 0) == [1.0]
    assert {tuple(Elbo().sigmas((1.0, 0.5, 0.0), i)) for i in range(20)} == {(1.0,), (0.5,)}


@pytest.mark.parametrize(("sampler", "anchor"), [("bank", "reference"), ("live", "old"), ("old", "live")])
def test_a_likelihood_asks_for_whom_it_samples_by_and_whom_it_is_anchored_to(sampler, anchor):
    assert Elbo(sampler=sampler, anchor=anchor).policies == {sampler, anchor} - {"live"}


SCALE, MEAN = 4.5, 0.7


def exact_velocity(x, sigma, mean, std):
    """Of N(mean, std^2), exactly."""
    variance = (1 - sigma) ** 2 * std**2 + sigma**2
    return (sigma - (1 - sigma) * std**2) / variance * (x - (1 - sigma) * mean) - mean


class Conditional(torch.nn.Module):
    """The velocity of N(mean, 0.5^2), guided away from that of N(0, 1) by `scale`."""

    def __init__(self):
        super().__init__()
        self.mean, self.scale, self.asked = torch.nn.Parameter(torch.full((2,), MEAN)), SCALE, []

    def forward(self, x, sigma, rows):
        self.asked.append((self.scale, torch.is_grad_enabled()))
        sigma = sigma[:, None]
        without = exact_velocity(x, sigma, 0.0, 1.0)
        return without + self.scale * (exact_velocity(x, sigma, self.mean, 0.5) - without)


class Guided(FieldPolicy):
    def unguided(self):
        return {"guidance_scale": 1.0}

    @contextmanager
    def call_overrides(self, guidance_scale=None, **call):
        field = self.modules["field"]
        before, field.scale = field.scale, guidance_scale or field.scale
        yield
        field.scale = before


@pytest.mark.parametrize(("guidance", "trained", "rises"), [("rollout", 1.0, True), ("pipeline", SCALE, False)])
def test_guidance_is_learnt_by_the_conditional_velocity_and_not_unlearnt(
    tmp_path, monkeypatch, guidance, trained, rises
):
    """Guided samples lie above the mean: what is fitted to them rises, but a velocity that is guided twice falls."""
    monkeypatch.setattr("field.FieldPolicy", Guided)
    sizes = {"train__groups": 4, "train__group_size": 12, "train__iterations": 1, "train__updates": 1}
    chosen = settings(tmp_path, algorithm={"preset": "rwr"}, model__guidance=guidance, **sizes)
    field = Conditional()
    run = trainer(chosen, field, reward=lambda samples, prompts: torch.ones(len(samples)), held_out=0, steps=10)
    run.run()
    assert {scale for scale, learns in field.asked if learns} == {trained}
    assert SCALE in {scale for scale, learns in field.asked if not learns}
    assert bool((field.mean > MEAN).all()) is rises
    assert bool((field.mean < MEAN).all()) is not rises


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_each_row_of_final_samples_sets_its_guidance_and_its_draft_unless_the_config_does(preset):
    row = filled({"algorithm": {"preset": preset}}, presets.BESIDE, "flow_grpo")
    own = row.get("model", {}).get("guidance", "pipeline")
    assert ("draft" in row.get("train", {})) == (preset == "sol_rl")
    written = {"model": {"guidance": "pipeline"}, "train": {"draft": None}, "algorithm": {"preset": preset}}
    assert filled(written, presets.BESIDE, "flow_grpo") == written
    assert (own == "pipeline") == (presets.PRESETS[preset]["likelihood"]["name"] == "trajectory")


@pytest.mark.parametrize(
    ("guidance", "said"),
    [("pipeline", "un-learns guidance; take rollout"), ("none", "with none, nft samples and trains")],
)
def test_a_guided_call_of_final_samples_is_warned_of(guidance, said):
    config = validate({"model": {"path": "shapes", "guidance": guidance}, "algorithm": {"preset": "nft"}})
    (sentence,) = likelihood_rules.guidance_warnings(config, 2)
    assert said in sentence
    assert likelihood_rules.guidance_warnings(config, 1) == []
    with pytest.raises(
        InputError,
        match=r"^model.guidance: the update scores steps with the guidance of the rollout",
    ):
        validate({"model": {"path": "shapes", "guidance": "rollout"}})
