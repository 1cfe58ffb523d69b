"""How hard losses pull at each step and divergences hold it, against the slopes of another program."""

import pytest
from gaussian_flow import schedule, step

from flowgrpo.flow.methods.objectives.policy_gradient import Clip, Divergence, NormalisedRatio
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
