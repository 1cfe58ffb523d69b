"""Losses of final samples: values and gradients of another program, and what they are of each other."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowgrpo.flow.methods.likelihood import Elbo
from flowgrpo.flow.methods.objectives.matching import (
    Centred,
    Contrast,
    Gradient,
    GroupSigmoid,
    PairPreference,
    PlackettLuce,
    Proximal,
    Regression,
    SemiPolicy,
    TwoBranch,
    VelocityTarget,
    optimality,
)
from flowgrpo.flow.methods.objectives.policy_gradient import Clip, Divergence, LossInputs

SEEN = json.loads((Path(__file__).parents[4] / "data" / "sample_losses.json").read_text())
A = torch.tensor(SEEN["group"]["A"], dtype=torch.float64)
REWARD = torch.tensor(SEEN["group"]["reward"], dtype=torch.float64)

UNRANKED = torch.zeros(4, dtype=torch.float64)


def numbers(case, key):
    return torch.tensor(SEEN[case][key], dtype=torch.float64)


def inputs(objective, weight, case, *, v, advantage, anchor="v_old"):
    """What the update hands to a loss, of four samples with noise levels of their own."""
    likelihood = Elbo(weight=weight)
    target, sigmas = numbers(case, "eps") - numbers(case, "x0"), SEEN[case]["sigma"]

    def score(error):
        return torch.cat([likelihood.log_prob(own[None], s) for own, s in zip(error, sigmas, strict=True)])

    old = numbers(case, anchor) - target if isinstance(anchor, str) else anchor - target
    error = v - target
    log_prob, old_log_prob = score(error), score(old)
    ell = (log_prob - old_log_prob).detach()
    return LossInputs(
        log_prob=log_prob,
        old_log_prob=old_log_prob,
        advantage=advantage,
        error=error,
        anchor_error=old,
        old_error=numbers(case, "v_old") - target,
        reference_error=numbers(case, "v_ref") - target,
        score=score,
        coefficient=objective.coefficients(ell, advantage, UNRANKED) if objective.couples == "group" else None,
        centre=(float(ell.mean()), float(optimality(advantage, 5.0).mean())) if objective.couples == "step" else None,
    )


def gradient(objective, weight, case="group", *, advantage=A, beta=0.0, v=None, anchor="v_old"):
    """Value and gradient (4, 3) in the velocity of the mean loss."""
    v = (numbers(case, "v") if v is None else v).clone().requires_grad_()
    given = inputs(objective, weight, case, v=v, advantage=advantage, anchor=anchor)
    loss = objective.loss(given).mean()
    if beta:
        loss = loss + beta * objective.divergence(given).mean()
    loss.backward()
    return loss.item(), v.grad


def pull(beta, previous=0.0):
    return {"form": "velocity", "beta": beta, "previous": previous}


CASES = {
    "epg": (Gradient(), "adaptive", {}),
    "epg_noratio": (Gradient(ratio=False), "adaptive", {}),
    "pepg": (Proximal(), "adaptive", {}),
    "par": (Proximal(), "adaptive", {}),
    "pepg_noratio": (Proximal(ratio=False), "adaptive", {}),
    "par_noratio": (Proximal(ratio=False), "adaptive", {}),
    "epg velocity": (Gradient(), "velocity", {}),
    "elbo clip": (Clip(clip_range=1e-3), "adaptive", {}),
    "elbo clip wide": (Clip(clip_range=0.2), "adaptive", {}),
    **{
        f"nft beta {beta} {weight}": (TwoBranch(beta=beta), weight, {})
        for beta in (1.0, 0.1)
        for weight in ("adaptive", "x0", "velocity")
    },
    # there with the ratio to the old policy and a clip of 1
    "awm ghuber": (Clip(clip_range=1.0, kl=pull(0.001, 1000.0)), "power", {"advantage": A / 5, "beta": 0.001}),
    "awm velocity": (Clip(clip_range=1.0), "velocity", {"advantage": A / 5}),
    "rwr": (Gradient(ratio=False), "velocity", {"advantage": REWARD}),
    "ram": (VelocityTarget(), "velocity", {}),
    "crd mse": (Centred(), "adaptive_velocity", {}),
    "dpo beta 100": (PairPreference(beta=100.0), "velocity", {"case": "shared"}),
    "dpo beta 2": (PairPreference(beta=2.0), "velocity", {"case": "shared"}),
    "dgpo beta 100": (GroupSigmoid(beta=100.0), "velocity", {"case": "shared"}),
    "dgpo beta 2": (GroupSigmoid(beta=2.0), "velocity", {"case": "shared"}),
    "gdro": (PlackettLuce(beta=2.0, temperature=0.05, best=0.5), "velocity", {"case": "shared", "advantage": REWARD}),
}
# Whose value is another: of a ratio that is detached there, of an equal gradient, and of a derivative times L.
OTHER_VALUE = ("epg", "epg velocity", "par", "par_noratio", "dpo beta 100", "dpo beta 2", "gdro")


@pytest.mark.parametrize("name", CASES)
def test_a_loss_has_the_gradient_of_the_other_program(name):
    objective, weight, options = CASES[name]
    value, found = gradient(objective, weight, **options)
    told = torch.tensor(SEEN["loss"][name]["grad"], dtype=torch.float64)
    torch.testing.assert_close(found, told, rtol=1e-6, atol=1e-7 * told.abs().max().item())
    if name not in OTHER_VALUE:
        assert value == pytest.approx(SEEN["loss"][name]["value"], rel=1e-8)


EQUAL = [
    *(Gradient(), Gradient(ratio=False), Proximal(), Clip(clip_range=0.1), TwoBranch(), TwoBranch(beta=0.1)),
    *(Centred(), Centred(beta=0.5)),
]


@pytest.mark.parametrize("objective", EQUAL, ids=lambda o: o.name)
def test_at_the_anchor_every_gradient_is_that_of_advantage_times_log_likelihood(objective):
    """CRD centres its advantages, and counts them as 2 of A / 10."""
    start = numbers("group", "v_old")
    _, found = gradient(objective, "velocity", v=start)
    wanted = A - A.mean() if objective.name == "centred" else A
    _, plain = gradient(Gradient(ratio=False), "velocity", v=start, advantage=wanted)
    torch.testing.assert_close(found, plain, rtol=1e-9, atol=1e-12)


def test_nft_of_the_plain_error_is_its_linear_term_and_a_pull_to_the_anchor():
    beta = 0.3
    _, found = gradient(TwoBranch(beta=beta), "velocity")
    v, old = numbers("group", "v"), numbers("group", "v_old")
    _, linear = gradient(Gradient(ratio=False), "velocity", v=old)
    bound = beta * 5.0 * 2 * (v - old) / 3 / 4  # of a mean over 3 numbers and 4 samples
    torch.testing.assert_close(found, linear + bound, rtol=1e-9, atol=1e-12)


def test_ram_at_the_old_policy_is_nft_of_another_scale():
    beta, most = 0.4, 5.0
    scale = 1 / (beta * most)
    objective = VelocityTarget(scale=scale)
    v = numbers("group", "v").clone().requires_grad_()
    given = inputs(objective, "velocity", "group", v=v, advantage=A)
    given = replace(given, reference_error=given.anchor_error)
    objective.loss(given).mean().backward()
    _, nft = gradient(TwoBranch(beta=beta), "velocity")
    torch.testing.assert_close(v.grad, nft * scale, rtol=1e-9, atol=1e-12)


def test_of_a_pair_dgpo_and_gdro_with_a_hard_ranking_are_dpo():
    """Which at equality is half of beta over two each way."""
    ell, sign, reward = (torch.tensor(pair).double() for pair in ([0.3, -0.2], [1.0, -1.0], [0.1, 0.9]))
    for beta in (0.5, 3.0):
        group = GroupSigmoid(beta=beta).coefficients(ell, sign, UNRANKED) * beta
        torch.testing.assert_close(group, PairPreference(beta=beta).coefficients(ell, sign, UNRANKED))
    hard = PlackettLuce(beta=2.0, temperature=1e-9, best=0.0).coefficients(ell, reward, UNRANKED)
    torch.testing.assert_close(hard, PairPreference(beta=4.0).coefficients(ell, reward, UNRANKED))
    slope = (
        PairPreference(beta=8.0).coefficients(torch.zeros(3).double(), torch.tensor([0.1, 0.9, 0.5]).double(), UNRANKED)
        / 3
    )
    assert slope.tolist() == pytest.approx([2.0, -2.0, 0.0])


@pytest.mark.parametrize("d_r", [0.3, -0.7])
@pytest.mark.parametrize("d_w", [-0.4, 0.25])
def test_seppo_is_the_formula_in_errors_of_both_policies(d_w, d_r):
    """Derivatives of -ln sigmoid(-beta (d_w - s d_r)), s = sgn(e_w^ref - e_w^live), in the live errors, by hand."""
    beta, s = 3.0, 1.0 if d_w < 0 else -1.0
    ell, advantage = torch.tensor([0.0, -d_r, -d_w]).double(), torch.tensor([0.2, -1.0, 1.5]).double()
    objective = SemiPolicy(beta=beta)
    inside = beta * (d_w - s * d_r)
    assert float(objective.group_loss(ell, advantage, UNRANKED)) == pytest.approx(math.log1p(math.exp(inside)))
    slope = beta / (1 + math.exp(-inside))  # in e_w; of minus e_w it is that of a log-probability
    assert (objective.coefficients(ell, advantage, UNRANKED) / 3).tolist() == pytest.approx([0.0, s * slope, -slope])


def test_seppo_pushes_the_other_sample_away_only_where_the_policy_denoises_the_winner_better():
    advantage = torch.tensor([1.0, -1.0]).double()
    better, worse, equal = (
        SemiPolicy(beta=8.0).coefficients(torch.tensor([ell, 0.1]).double(), advantage, UNRANKED)
        for ell in (0.2, -0.2, 0.0)
    )
    assert better[0] < 0 < better[1]  # the loss falls as a log-probability with a negative derivative rises
    assert worse[0] < 0
    assert worse[1] < 0
    assert (equal / 2).tolist() == pytest.approx([-4.0, 0.0])  # at the snapshot: -beta / 2 grad L of the winner alone


@pytest.mark.parametrize(
    "objective",
    [
        *(PairPreference(beta=3.0), SemiPolicy(beta=3.0), GroupSigmoid(beta=3.0), PlackettLuce(beta=2.0)),
        *(Regression(eps=0.1), Regression(scale=3.0)),
        Contrast(temperature=0.2, penalty=0.0),
    ],
)
def test_coefficients_are_finite_differences_of_the_group_s_loss(objective):
    ell, advantage = torch.tensor([0.3, -0.1, 0.2, -0.4]).double(), torch.tensor([0.2, 1.0, -0.7, 0.3]).double()
    found = objective.coefficients(ell, advantage, UNRANKED) / 4
    told = torch.sigmoid(-3.0 * (advantage * ell).mean()) if objective.name == "group_sigmoid" else None
    for i in range(4):
        step = torch.zeros(4).double()
        step[i] = 1e-6
        if told is not None:  # its weight has no gradient
            difference = (-(told * advantage * step).mean()) / 1e-6
        else:
            above, below = (objective.group_loss(ell + way, advantage, UNRANKED) for way in (step, -step))
            difference = (above - below) / 2e-6
        assert found[i].item() == pytest.approx(difference.item(), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("objective", "takes"), [(PairPreference(), "1, 3"), (SemiPolicy(), "1, 3"), (PlackettLuce(), "0, 1, 2, 3")]
)
def test_a_group_of_equals_teaches_nothing(objective, takes):
    assert not objective.takes(torch.zeros(4)).any()
    took = objective.takes(torch.tensor([0.1, 0.5, 0.5, -1.0])).nonzero().flatten()
    assert ", ".join(map(str, took.tolist())) == takes
    ell = torch.tensor([0.1, 0.2, -0.1, 0.4]).double()
    assert GroupSigmoid().coefficients(ell, torch.zeros(4).double(), UNRANKED).tolist() == [0.0] * 4


def test_what_has_gone_too_far_from_the_old_policy_is_clipped():
    """Samples with A > 0 above 1 + c, those with A <= 0 below 1 - c, have no gradient."""
    objective = GroupSigmoid(beta=2.0, clip_range=0.05)
    v = numbers("shared", "v").clone().requires_grad_()
    given = inputs(objective, "velocity", "shared", v=v, advantage=A)
    ratio = (given.log_prob - given.score(given.old_error)).exp()
    stopped = torch.where(A > 0, ratio > 1.05, ratio < 0.95)
    assert 0 < stopped.sum() < 4
    assert objective.clipped(given).tolist() == stopped.tolist()
    objective.loss(given).sum().backward()
    assert (v.grad.abs().sum(1) == 0).tolist() == stopped.tolist()


def test_bad_samples_are_held_less():
    assert optimality(torch.tensor([-9.0, -5.0, 0.0, 2.5, 5.0, math.inf]), 5.0).tolist() == [0, 0, 0.5, 0.75, 1, 1]
    held = Centred(adaptive_kl=0.2, kl=pull(0.1))
    even = Centred(kl=pull(0.1))
    given = inputs(even, "velocity", "group", v=numbers("group", "v"), advantage=A)
    weights = 0.2 + 0.8 * optimality(A, 5.0)
    torch.testing.assert_close(held.divergence(given), even.divergence(given) * weights)


def test_a_contrast_of_log_ratios_stays_near_the_anchor():
    """Of good samples 0 and 1 (A > 0); log ratios of mean -0.2 are past a limit of 0.05: 3 x 0.15 off every sample."""
    ell, advantage = torch.tensor([0.1, -0.3, -0.2, -0.4]).double(), torch.tensor([1.0, 0.5, 0.0, -1.5]).double()
    bad = [math.exp(-0.2 / 0.1), math.exp(-0.4 / 0.1)]
    free = [-0.5, -0.5, bad[0] / sum(bad), bad[1] / sum(bad)]
    found = Contrast(temperature=0.1, limit=0.05, penalty=3.0).coefficients(ell, advantage, UNRANKED) / 4
    assert found.tolist() == pytest.approx([slope - 3 * 0.15 / 4 for slope in free], rel=1e-5)


def test_a_contrast_of_samples_ranks_the_good_by_the_second_reward():
    """Samples 0 and 1 are good, of second rewards 0.3 and 0.1; those of bad samples have no effect."""
    ell, advantage = torch.tensor([0.1, -0.3, -0.2, -0.4]).double(), torch.tensor([1.0, 0.5, 0.0, -1.5]).double()
    objective = Contrast(temperature=1e6, rank_by="brevity", rank_temperature=0.2, penalty=0.0)
    for bad in (0.0, 9.0, math.nan):
        found = objective.coefficients(ell, advantage, torch.tensor([0.3, 0.1, bad, -bad])) / 4
        weights = [math.exp(0.3 / 0.2), math.exp(0.1 / 0.2)]
        pulls = [-weight / sum(weights) for weight in weights]
        assert found.tolist() == pytest.approx([*pulls, 0.5, 0.5], rel=1e-5)


def test_the_pull_of_a_regression_at_the_anchor_is_a_policy_gradient_over_eps():
    """-2 A grad L / eps of each sample, for advantages of mean 0; with a number -2 A scale grad L."""
    advantage, start = A - A.mean(), numbers("shared", "v_old")
    _, plain = gradient(Gradient(ratio=False), "velocity", case="shared", v=start, advantage=advantage)
    for objective in (Regression(eps=0.5), Regression(scale=2.0)):
        _, found = gradient(objective, "velocity", case="shared", v=start, advantage=advantage)
        torch.testing.assert_close(found, 4 * plain, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("previous", "asked"), [(0.0, {"reference"}), (2.0, {"reference", "old"})])
def test_a_pull_is_the_squared_distance_of_velocities(previous, asked):
    """From the reference, and from the old policy on top; the anchor, here another one, has no part."""
    objective = Gradient(kl=Divergence(form="velocity", beta=0.1, previous=previous))
    anchor = 2 * numbers("group", "v_old")
    given = inputs(objective, "velocity", "group", v=numbers("group", "v"), advantage=A, anchor=anchor)
    v, old, reference = (numbers("group", key) for key in ("v", "v_old", "v_ref"))
    pulls = (v - reference).square().mean(1) + previous * (v - old).square().mean(1)
    torch.testing.assert_close(objective.divergence(given), pulls)
    assert objective.policies == asked
