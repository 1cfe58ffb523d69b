"""How hard losses pull at each step and divergences hold it, by another program; and which edges Flow-DPPO's mask stops."""

import math

import pytest
import torch
from field import lines, settings, trainer
from gaussian_flow import schedule, step

from flowgrpo.flow.methods.objectives.policy_gradient import Clip, Divergence, KlMask, LossInputs, NormalisedRatio
from samplers.kernels import Kernel

SIGMAS = schedule()
CAP = SIGMAS[1]
LEVEL = 0.7
DIFFUSING = ("flow_sde", "dance_sde")
PAIRS = [(SIGMAS[i], SIGMAS[i + 1]) for i in (0, 4, 8)]


def steps(kernel, form="mean"):
    return [(Kernel(kernel, LEVEL, form), *pair) for pair in PAIRS]


def told(kernel):
    """Slope, std and size of each of those steps."""
    found = [step(kernel, LEVEL, *pair, CAP) for pair in PAIRS]
    return [(each.push, each.noise, sigma - after) for each, (sigma, after) in zip(found, PAIRS, strict=True)]


@pytest.mark.parametrize("kernel", [*DIFFUSING, "cps", "manifold"])
def test_a_divergence_holds_by_its_curvature(kernel):
    """(push / std)^2; of Flow-GRPO's form the std of a diffusion is without its step."""
    exact, own, flat = (
        Clip(kl=Divergence(form=form, beta=0.1)).holds(steps(kernel), CAP)
        for form in ("exact", "flow_grpo", "velocity")
    )
    assert exact == pytest.approx([(push / std) ** 2 for push, std, _ in told(kernel)], rel=1e-4)
    sizes = [size if kernel in DIFFUSING else 1.0 for *_, size in told(kernel)]
    assert own == pytest.approx(
        [(push / std) ** 2 * size for (push, std, _), size in zip(told(kernel), sizes, strict=True)], rel=1e-4
    )
    assert flat == [2.0] * 3


def test_a_step_without_noise_is_held_by_no_divergence_of_it():
    assert Clip(kl=Divergence(form="exact", beta=0.1)).holds([(Kernel(), 0.5, 0.25)], CAP) == [0.0]


@pytest.mark.parametrize("kernel", [*DIFFUSING, "cps"])
def test_a_loss_pulls_by_its_slope_over_its_std(kernel):
    known = told(kernel)
    assert Clip().pulls(steps(kernel), CAP) == pytest.approx([-push / std for push, std, _ in known], rel=1e-4)
    free = Clip().pulls(steps(kernel, "constant_free"), CAP)
    assert free == pytest.approx([-push * 2 * std for push, std, _ in known], rel=1e-4)
    guard = NormalisedRatio().pulls(steps(kernel), CAP)
    assert guard == pytest.approx([-push / size for push, _, size in known], rel=1e-4)
    weighed = Clip(step_weights="noise_aware").pulls(steps(kernel), CAP)
    mean = sum(std for _, std, _ in known) / 3
    assert weighed == pytest.approx([-push / mean for push, *_ in known], rel=1e-4)


STD = 0.5


def inputs(log_ratio, advantage, moved):
    """One edge of four dimensions, whose mean has moved by a number in each; its log-probability is trained."""
    old = torch.tensor([-1.5])
    log_prob = (old + log_ratio).requires_grad_()
    return LossInputs(
        log_prob=log_prob,
        old_log_prob=old,
        advantage=torch.tensor([advantage]),
        mean=(torch.full((1, 4), moved),),
        old_mean=(torch.zeros(1, 4),),
        std=torch.tensor(STD),
    )


FAR, NEAR = 0.01, 0.002  # KLs of 2e-4 and 8e-6 at the std of 0.5


@pytest.mark.parametrize(
    ("ratio", "advantage", "moved", "kept"),
    [
        (1.5, 2.0, FAR, False),
        (0.5, -2.0, FAR, False),
        (0.5, 2.0, FAR, True),  # it went the other way, and is pulled back
        (1.5, -2.0, FAR, True),
        (1.0, 2.0, FAR, True),
        (1.5, 2.0, NEAR, True),  # no clip, however large the ratio
        (0.5, -2.0, NEAR, True),
        (1.5, 0.0, FAR, True),
    ],
)
def test_an_edge_is_stopped_where_its_step_has_gone_too_far_the_wanted_way(ratio, advantage, moved, kept):
    edge = inputs(math.log(ratio), advantage, moved)
    objective = KlMask()
    assert objective.clipped(edge).tolist() == [not kept]
    loss = objective.loss(edge)
    assert loss.item() == pytest.approx(-advantage * ratio if kept else 0.0)
    loss.sum().backward()
    assert edge.log_prob.grad.item() == pytest.approx(-advantage * ratio if kept else 0.0)


@pytest.mark.parametrize(("limit", "kept"), [(1.999e-4, False), (2.001e-4, True)])
def test_the_limit_is_of_the_kl_averaged_over_dimensions(limit, kept):
    """0.01^2 / (2 x 0.25), in one dimension as in four."""
    edge = inputs(0.1, 1.0, FAR)
    assert KlMask(limit=limit).clipped(edge).tolist() == [not kept]


def test_the_kl_itself_has_no_gradient():
    edge = inputs(0.1, 1.0, NEAR)
    mean = edge.mean[0].requires_grad_()
    KlMask().loss(edge).sum().backward()
    assert mean.grad is None


def test_a_second_update_is_stopped_where_the_first_went_too_far(tmp_path):
    def run(limit, rate):
        chosen = settings(
            tmp_path / f"{limit}-{rate}",
            algorithm={"preset": "flow_dppo", "objective": {"limit": limit}},
            train__updates=4,
            train__iterations=2,
            train__learning_rate=rate,
        )
        made = trainer(chosen)
        made.run()
        return lines(made)

    bold, patient, careful = run(1e-5, 0.1), run(1e3, 0.1), run(1e-5, 1e-6)
    assert all(0.1 < line["policy/clip_fraction"] < 0.9 for line in bold)
    assert all(line["policy/clip_fraction"] == 0 for line in (*patient, *careful))
    assert all(line["policy/max_abs_log_ratio"] == 0 for line in (*bold, *patient, *careful))
