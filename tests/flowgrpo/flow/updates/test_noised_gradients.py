"""Gradients of final samples away from their anchor, each against its formula, written again."""

from dataclasses import replace

import pytest
import torch
from field import credit, settings, step_in_place, trainer


def run_of(folder, preset, likelihood=(), **options):
    algorithm = {"preset": preset, "likelihood": dict(likelihood), **options}
    sizes = {"train__group_size": 6, "train__groups": 2, "train__updates": 1}
    return trainer(settings(folder, algorithm=algorithm, **sizes))


def moved(run, far, group_weights=(1.0, 1.0)):
    """What is credited to a rollout of the policy, and the gradient there once the policy has moved."""
    batch = run.rollout(0, run.groups(0))
    with torch.no_grad():
        for i, p in enumerate(run.weights.parameters):
            p.add_(far * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    credited = credit(run, batch)
    groups = torch.tensor([node.root.group for node in credited.tree.nodes])
    weights = torch.tensor(group_weights, dtype=torch.float64)[groups.unique(return_inverse=True)[1]]
    credited = replace(credited, noised=replace(credited.noised, factors=weights))
    step_in_place(run, credited)
    return batch, credited.noised, torch.cat([p.grad.flatten() for p in run.weights.parameters])


def gradient_of(loss, run):
    return torch.cat([own.flatten() for own in torch.autograd.grad(loss, run.weights.parameters)])


def squared_errors(run, noised, policy):
    """The squared error of each draw under a policy."""
    found = {}
    for call in noised.calls:
        state, target = noised.noised(call)
        with run.weights.policy(policy), torch.set_grad_enabled(policy == "live"):
            (velocity,) = run.policy.velocity(state, call.sigma, noised.rows(call))
        found |= dict(zip(call.draws, (velocity - target).square().mean(1), strict=True))
    return found


@pytest.mark.parametrize("antithetic", [False, True])
def test_the_gradient_of_seppo_is_that_of_its_formula(tmp_path, antithetic):
    """-ln sigmoid(-beta (d_w - s d_r)) of each pair and noise level, d = e - e_ref, s = sgn(e_w^ref - e_w): the mean.

    Noise and its negative are compared by themselves.
    """
    run = run_of(tmp_path, "seppo", {"draws": 5, "antithetic": antithetic}, objective={"beta": 2.0})
    batch, noised, found = moved(run, 0.05)
    live, reference = (squared_errors(run, noised, policy) for policy in ("live", "bank"))
    pairs, losses, signs = {}, [], set()
    for draw in live:
        reward = float(batch.scores.values[draw.leaf, 0])
        group = noised.node(draw).root.group
        pairs.setdefault((group, draw.number, draw.sign), []).append((reward, draw.leaf, draw))
    for own in pairs.values():
        (*_, other), (*_, winner) = min(own), max(own)
        d_w, d_r = (live[draw] - reference[draw] for draw in (winner, other))
        sign = torch.sign(reference[winner] - live[winner]).detach()
        signs.add(float(sign))
        losses.append(-torch.nn.functional.logsigmoid(-2.0 * (d_w - sign * d_r)))
    assert signs == {-1.0, 1.0}
    assert len(losses) == 10 * (1 + antithetic)
    torch.testing.assert_close(found, gradient_of(torch.stack(losses).mean(), run), rtol=1e-4, atol=1e-6)


def test_the_gradient_of_crd_is_that_of_its_formula(tmp_path):
    """5 (ell - mean ell - (r - mean r))^2, ell the log ratio and r = A / 10 + 1/2, over all draws of a step: the mean."""
    run = run_of(tmp_path, "crd", {"weight": "velocity"}, objective={"kl": {"beta": 0.0}})
    batch, noised, found = moved(run, 0.2)
    live, old = (squared_errors(run, noised, policy) for policy in ("live", "old"))
    ell = torch.stack([old[draw] - live[draw] for draw in live])
    rewards = batch.scores.values[:, 0].double()
    groups = torch.tensor([noised.tree.nodes[leaf].root.group for leaf in noised.tree.leaves])
    mean = torch.stack([rewards[groups == group].mean() for group in groups])
    advantage = (rewards - mean) / (rewards.std(correction=0) + 1e-4)
    assert advantage.abs().max() < 5
    good = (advantage / 10 + 0.5)[[draw.leaf for draw in live]].float()
    assert ell.mean().abs() > 0.05  # so that the centring matters
    away = (ell - ell.detach().mean()) - (good - good.mean())
    torch.testing.assert_close(found, gradient_of((5 * away.square()).mean(), run), rtol=1e-4, atol=1e-5)


def test_a_divergence_has_its_coefficient_and_a_group_its_weight(tmp_path):
    """w (-A L + beta (v - v_ref)^2) of each draw, L = -(v - target)^2 and w the group's weight: the mean, of number."""
    beta, weights = 0.25, (2.0, 0.5)
    run = run_of(tmp_path, "rwr", {"draws": 4}, objective={"kl": {"form": "velocity", "beta": beta}})
    _, noised, found = moved(run, 0.1, weights)
    live, losses = squared_errors(run, noised, "live"), []
    groups = sorted({noised.node(draw).root.group for draw in live})
    assert len(groups) == 2
    for call in noised.calls:
        state, _ = noised.noised(call)
        with run.weights.policy("reference"), torch.no_grad():
            (reference,) = run.policy.velocity(state, call.sigma, noised.rows(call))
        (velocity,) = run.policy.velocity(state, call.sigma, noised.rows(call))
        for draw, pull in zip(call.draws, (velocity - reference).square().mean(1), strict=True):
            loss = noised.advantages[draw.edge].float() * live[draw] + beta * pull
            losses.append(weights[groups.index(noised.node(draw).root.group)] * loss)
    torch.testing.assert_close(found, gradient_of(torch.stack(losses).mean(), run), rtol=1e-4, atol=1e-5)
