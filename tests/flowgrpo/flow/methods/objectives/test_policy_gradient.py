import math
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from gaussian_flow import step

from flowgrpo.flow.methods.objectives.policy_gradient import (
    KL,
    Clip,
    Divergence,
    LossInputs,
    NormalisedRatio,
    SoftGate,
    equalise,
    noise_aware,
    plain_ratio,
    previous_kl,
)
from flowgrpo.flow.pipeline.velocity_field import FieldPolicy
from flowgrpo.flow.updates.update import Credited, update_part
from flowgrpo.training.advantages.clipped_ratio import bounded_exp, clip_loss, clip_mask, soft_gate_loss
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.weights.trained_weights import Weights
from samplers.growth import grow
from samplers.kernels import Kernel, log_prob, transition
from samplers.plans import chain
from samplers.schedule import euler_sigmas, linear_sigmas
from samplers.trees import Root


def normalised_ratio(case):
    return bounded_exp(NormalisedRatio().log_ratio(case))


def terms(log_ratio, advantage, **others):
    log_ratio, zeros = torch.tensor(log_ratio), (torch.zeros(len(log_ratio), 4),)
    old = torch.full_like(log_ratio, -1.5)
    given = {"mean": zeros, "std": torch.tensor(0.5), "step_size": 0.1, "velocity": zeros, "log_prob": old + log_ratio}
    return LossInputs(**{**given, "old_log_prob": old, "advantage": torch.tensor(advantage), **others})


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "stopped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.5, 2.0, -2.0 * 1.3, True),  # a good edge gains nothing beyond 1 + high
        (0.5, 2.0, -2.0 * 0.5, False),  # but is pulled back up from below
        (1.5, -2.0, 2.0 * 1.5, False),  # a bad edge is pushed down from above
        (0.5, -2.0, 2.0 * 0.9, True),  # and not below 1 - low
        (0.5, 0.0, 0.0, False),
    ],
)
def test_the_clip_is_asymmetric_and_pessimistic_and_what_is_clipped_has_no_gradient(ratio, advantage, loss, stopped):
    case, moved = terms([0.0], [advantage]), torch.tensor([math.log(ratio)], requires_grad=True)
    case = replace(case, log_prob=case.old_log_prob + moved)
    found = clip_loss(plain_ratio(case), case.advantage, 0.1, 0.3)
    assert found.item() == pytest.approx(loss)
    assert clip_mask(plain_ratio(case), case.advantage, 0.1, 0.3).item() is stopped
    assert (torch.autograd.grad(found.sum(), moved)[0].item() == 0) is (stopped or advantage == 0)


@pytest.mark.parametrize(("name", "level", "over"), [("flow_sde", 0.7, 0.1), ("cps", 0.8, 1.0)])
def test_kl_forms_on_one_step_are_multiples_of_the_squared_velocity_gap(name, level, over):
    """Flow-GRPO's `std_dev_t` is std / sqrt(h) for flow_sde, and the std itself, without a step to take out, for cps."""
    x, v, reference = torch.randn(3, 3, 5)
    kernel, known = Kernel(name, level), step(name, level, 0.6, 0.5, 0.9)
    (mean, other), std = ([transition(kernel, (x,), (of,), 0.6, 0.5, 0.9)[0] for of in (v, reference)], known.noise)
    others = {"velocity": (v,), "reference_mean": other, "reference_velocity": (reference,), "step_size": 0.1}
    case = terms([0.0] * 3, [0.0] * 3, mean=mean, std=torch.tensor(std), diffuses=kernel.diffuses, **others)
    gap = ((v - reference) ** 2).mean(1)
    exact = gap * known.push**2 / (2 * std**2)
    torch.testing.assert_close(KL["velocity"](case), gap)
    torch.testing.assert_close(KL["exact"](case), exact, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(KL["flow_grpo"](case), exact * over, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("log_ratio", [1e3, -1e3])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_beyond_any_clip_has_a_finite_loss_and_no_gradient(log_ratio, advantage):
    """exp(1000) is infinite, and the 0 of a clip times it is not a number."""
    moved, zero = torch.tensor([log_ratio], requires_grad=True), torch.zeros(1)
    case = terms([0.0], [advantage], log_prob=moved, old_log_prob=zero, old_mean=(torch.zeros(1, 4),))
    for ratio in (plain_ratio(case), normalised_ratio(case)):
        loss = clip_loss(ratio, case.advantage, 0.2, 0.2)
        (gradient,) = torch.autograd.grad(loss.sum(), moved)
        assert loss.isfinite().all()
        assert gradient.tolist() == [0.0]


def test_exact_and_previous_kl_are_divergences_of_two_gaussians():
    a, b, std = torch.randn(2, 6), torch.randn(2, 6), torch.tensor(0.3)
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(normal(a, std), normal(b, std)).mean(1)
    case = terms([0.0] * 2, [0.0] * 2, mean=(a,), std=std, reference_mean=(b,))
    torch.testing.assert_close(KL["exact"](case), expected)
    case = terms([0.0] * 2, [0.0] * 2, mean=(a,), std=std, old_mean=(b,), reference_mean=(a - 0.3,))
    torch.testing.assert_close(previous_kl(case), expected)
    for previous in (0.1, 0.0):
        objective = Clip(kl=Divergence(form="exact", beta=1.0, previous=previous))
        # 0.3^2 / (2 0.3^2) from the reference
        torch.testing.assert_close(objective.divergence(case), 0.5 + previous * expected)
        assert objective.needs_old_means is (previous > 0)


@pytest.mark.parametrize(
    ("beta", "measured", "following"),
    [
        (0.02, 0.16, 0.04),  # above 1.5 x 0.1
        (0.02, 0.14, 0.02),
        (0.02, 0.07, 0.02),
        (0.02, 0.06, 0.01),  # below 0.1 / 1.5
        (0.06, 9.0, 0.1),  # not above the upper bound
        (0.015, 0.0, 0.01),  # nor below the lower one
    ],
)
def test_the_coefficient_doubles_and_halves_within_its_bounds(beta, measured, following):
    assert Divergence(beta=0.01, target=0.1, max_beta=0.1).adapt(beta, measured) == pytest.approx(following)
    assert Divergence(beta=0.01).adapt(beta, measured) == beta
    assert Divergence(beta=0.01, target=0.1, max_beta=0.1).adapt(beta, None) == beta


def sd3_steps(count):
    """The first steps of ten of SD3.5's schedule, with the released code's kernel; and the schedule."""
    sigmas = euler_sigmas(10, 3.0).tolist()
    return [(Kernel("flow_sde", 0.7), *pair) for pair in pairwise(sigmas)][:count], sigmas


@pytest.mark.parametrize(("count", "constant"), [(9, 2.2522), (10, 2.4985)])
def test_noise_aware_weights_compute_the_constant_of_the_released_code(count, constant):
    steps, sigmas = sd3_steps(count)
    stds = [step("flow_sde", 0.7, *pair, sigmas[1]).noise for pair in pairwise(sigmas[: count + 1])]
    weights = noise_aware(steps, sigmas[1])
    assert [w / std for w, std in zip(weights, stds, strict=True)] == pytest.approx([constant] * count, abs=1e-3)
    assert statistics.fmean(weights) == pytest.approx(1)


def test_noise_aware_weights_fall_from_noise_to_data():
    steps, sigmas = sd3_steps(9)  # of ten
    expected = [1.58, 1.67, 1.21, 1.00, 0.88, 0.80, 0.72, 0.63, 0.51]
    chosen = Clip(step_weights="noise_aware").weights(steps, sigmas[1])
    assert list(chosen) == steps
    assert list(chosen.values()) == pytest.approx(expected, abs=6e-3)
    assert list(Clip().weights(steps, sigmas[1]).values()) == [1.0] * 9


SAGE = linear_sigmas(20, 5.0).tolist()


@pytest.mark.parametrize(("name", "level"), [("manifold", 0.5), ("flow_sde", 0.7), ("dance_sde", 0.3), ("cps", 0.8)])
def test_equalised_weights_make_all_steps_pull_as_the_median_one(name, level):
    pairs = list(pairwise(SAGE))[:19]
    taken = [step(name, level, *pair, SAGE[1]) for pair in pairs]
    sizes = [-each.push / each.noise for each in taken]  # |d mean / d v| / std by the papers' formulas
    steps = [(Kernel(name, level), *pair) for pair in pairs]
    expected = [statistics.median(sizes) / size for size in sizes]
    assert list(Clip(step_weights="equalised").weights(steps, SAGE[1]).values()) == pytest.approx(expected, rel=2e-3)


def test_equalised_weights_of_sage_run_over_two_orders():
    """Of the twenty N the figures take the tenth for the median, as torch.median does."""
    weights = equalise([(Kernel("manifold", 0.5), *pair) for pair in pairwise(SAGE)], SAGE[1])
    assert weights[0] / weights[-1] == pytest.approx(148, abs=1)
    assert weights == sorted(weights, reverse=True)
    assert weights[0] == pytest.approx(8.15, abs=0.01)
    assert weights[-1] == pytest.approx(0.055, abs=5e-4)
    without_noise = [(Kernel("cps", 0.8), 0.9, 0.5), (Kernel("cps", 0.8), 0.5, 0.0)]
    assert equalise(without_noise, 0.9)[1] == 1


def moved(noise, shift, std):
    """Inputs of a step that drew `noise`, and whose mean has moved by `shift` since."""
    old = torch.linspace(-1, 1, noise.numel()).reshape(noise.shape)
    std, new = torch.tensor(std), old + shift
    following = (old + std * noise,)
    scores = {"log_prob": log_prob(following, (new,), std), "old_log_prob": log_prob(following, (old,), std)}
    rows = len(noise)
    return terms([0.0] * rows, [1.5] * rows, **scores, mean=(new,), std=std, step_size=0.05, old_mean=(old,))


NOISE = torch.tensor([[0.3, -1.2, 2.0, 0.1], [-0.5, 0.7, 0.2, -2.0]])
SHIFT = torch.tensor([[0.02, 0.01, -0.03, 0.04], [0.05, 0.0, 0.01, -0.02]])


@pytest.mark.parametrize("std", [0.05, 0.3, 1.0])
def test_a_normalised_ratio_weighs_the_move_against_the_noise_alike_at_every_step(std):
    """log r = [mean (std e)^2 - mean (std e - d)^2] / (2 std^2) = mean(d e) / std - mean d^2 / (2 std^2)."""
    case = moved(NOISE, SHIFT, std)
    torch.testing.assert_close(normalised_ratio(case), torch.exp((SHIFT * NOISE).mean(1)), rtol=2e-5, atol=0)
    plain = (SHIFT * NOISE).mean(1) / std - (SHIFT**2).mean(1) / (2 * std**2)
    torch.testing.assert_close(plain_ratio(case), torch.exp(plain), rtol=2e-5, atol=0)


@pytest.mark.parametrize(
    ("ratio", "bias"), [(plain_ratio, -(SHIFT**2).mean(1) / 0.02), (normalised_ratio, torch.zeros(2))]
)
def test_a_normalised_ratio_has_no_bias(ratio, bias):
    """Over a noise and its mirror image plain log ratios average to -mean d^2 / (2 std^2), normalised ones to 0."""
    mean = sum(torch.log(ratio(moved(sign * NOISE, SHIFT, 0.1))) for sign in (1, -1)) / 2
    torch.testing.assert_close(mean, bias, rtol=1e-3, atol=1e-6)


def test_the_loss_of_normalised_ratios_is_divided_by_the_step():
    guard = NormalisedRatio(clip_range=[0.01, 0.002])
    assert guard.needs_old_means
    still = moved(NOISE, torch.zeros(2, 4), 0.2)
    assert normalised_ratio(still).tolist() == plain_ratio(still).tolist() == [1, 1]
    assert guard.loss(still).tolist() == pytest.approx([-1.5 / 0.05] * 2)
    case = moved(NOISE, SHIFT, 0.2)
    ratios = torch.exp((SHIFT * NOISE).mean(1)).tolist()
    assert ratios == pytest.approx([math.exp(-0.0155), math.exp(0.00425)])  # beyond either bound
    assert guard.loss(case).tolist() == pytest.approx([-1.5 * ratios[0] / 0.05, -1.5 * 1.002 / 0.05], rel=1e-4)
    assert guard.clipped(case).tolist() == [False, True]
    other = replace(case, advantage=-case.advantage)
    assert guard.loss(other).tolist() == pytest.approx([1.5 * 0.99 / 0.05, 1.5 * ratios[1] / 0.05], rel=1e-4)
    assert guard.clipped(other).tolist() == [True, False]


@pytest.mark.parametrize("surrogate", ["kept_gradient", "frozen_ratio"])
def test_surrogates_keep_the_gradient_of_the_normalised_ratio_beyond_its_clip(surrogate):
    """As in the test above: a gradient of the bounds where the first and the last edge had none."""
    case = moved(NOISE, SHIFT, 0.2)
    case = replace(case, log_prob=case.log_prob.requires_grad_())
    weights = {"kept_gradient": [math.exp(-0.0155), 1.002], "frozen_ratio": [0.99, 1.002]}[surrogate]
    guard = NormalisedRatio(clip_range=[0.01, 0.002], surrogate=surrogate)
    (slope,) = torch.autograd.grad(guard.loss(case).sum(), case.log_prob)
    assert slope.tolist() == pytest.approx([-1.5 * weight * 0.2 / 0.05 for weight in weights], rel=1e-4)
    assert guard.clipped(case).tolist() == [False, False]
    assert NormalisedRatio(clip_range=[0.01, 0.002]).clipped(case).tolist() == [False, True]


@pytest.mark.parametrize("ratio", [0.0, 0.7, 0.95, 1.0, 1.2, 1.6, 9.0])
def test_a_soft_gate_is_open_at_one_and_closes_on_both_sides(ratio):
    """The slope of -A r times sech^2(t (r - 1) / 2), t by the sign of A."""
    ratios = torch.full((3,), ratio, requires_grad=True)
    loss = soft_gate_loss(ratios, torch.tensor([2.0, -3.0, 0.0]), 5.0, 8.0)
    gates = [1 / math.cosh(t * (ratio - 1) / 2) ** 2 for t in (5.0, 8.0)]
    (slope,) = torch.autograd.grad(loss.sum(), ratios)
    assert slope.tolist() == pytest.approx([-2 * gates[0], 3 * gates[1], 0], rel=1e-4, abs=1e-6)


def test_a_soft_gate_is_the_papers_sigmoid():
    ratio, advantage = torch.tensor([0.8, 1.3]), torch.tensor([2.0, -1.0])
    expected = [-2 * 4 / 5 / (1 + math.exp(-5 * -0.2)), 1 * 4 / 8 / (1 + math.exp(-8 * 0.3))]
    assert soft_gate_loss(ratio, advantage, 5.0, 8.0).tolist() == pytest.approx(expected)
    case = terms([math.log(0.8), math.log(1.3)], [2.0, -1.0])
    assert SoftGate(temperature=[5.0, 8.0]).loss(case).tolist() == pytest.approx(expected)
    assert SoftGate().clipped(case).tolist() == [False, False]


def test_a_cold_gate_is_the_plain_loss():
    """4 / t sigmoid(t (r - 1)) = 2 / t + (r - 1) + O(t^2)."""
    ratio, advantage = torch.tensor([0.5, 0.5, 2.0, 2.0], dtype=torch.float64), torch.tensor([1.0, -2.0, 1.0, -2.0])
    loss = soft_gate_loss(ratio, advantage.double(), 2**-10, 2**-10) + advantage * 2 * 2**10
    torch.testing.assert_close(loss, -advantage * (ratio - 1), rtol=0, atol=1e-6)


class Constant(torch.nn.Module):
    """A velocity that is its parameter, whatever the state."""

    def __init__(self):
        super().__init__()
        self.velocity = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x, sigma, rows):
        return self.velocity.expand(len(x), 2)


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_a_step_weight_scales_the_policy_loss_and_not_the_divergence(weight):
    """One edge from noise, with mean x - h v and error std * noise: d log p / d v = -h noise / (2 std)."""
    level, beta, advantage, noise = 0.3, 0.25, 1.5, torch.tensor([0.4, -0.8])
    policy = FieldPolicy(Constant(), (2,), (1.0, 0.75, 0.0))
    weights = Weights(policy.modules, None, reference="fixed")
    (velocity,) = weights.parameters
    gap = torch.tensor([0.5, 0.2])
    velocity.data += gap  # away from the reference, and then rolled out
    plan, start = chain([Kernel("dance_sde", level)] * 2, (0,), (0,)), (torch.zeros(1, 2),)
    with torch.no_grad():
        tree = grow(plan, policy.sigmas, [Root(0, 0, None)], start, policy.velocity, lambda *address: noise, 1)
    zero, one = torch.zeros(1), torch.ones(1)
    credited = Credited(
        tree=tree,
        units=CreditUnits(zero[:, None], zero[:, None], one, torch.tensor([-1, 0, 0]), root=zero),
        advantages=torch.tensor([advantage]),
        step_weights={tree.trained_steps[0]: weight},
        beta=beta,
        group_weight=one,
    )
    measured = update_part(
        policy,
        credited,
        0,
        weights=weights,
        optimizer=torch.optim.SGD([velocity], lr=1.0),
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        objective=Clip(kl=Divergence(form="velocity", beta=beta)),
        max_grad_norm=1e9,
        sum_shards=lambda x: x,
        sum_processes=lambda x: x,
        moved=False,
    )
    policy_slope = -advantage * (-0.25 * noise / (2 * level * math.sqrt(0.25)))
    expected = gap - weight * policy_slope - beta * 2 * gap / 2
    torch.testing.assert_close(velocity.detach(), expected, rtol=1e-4, atol=1e-5)
    assert measured.kl == pytest.approx((0.5**2 + 0.2**2) / 2)
