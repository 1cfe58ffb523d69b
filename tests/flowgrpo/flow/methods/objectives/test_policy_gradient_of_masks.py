"""Flow-DPPO's mask: which edges it stops, what the others' gradient is, and that a run of it moves."""

import math

import pytest
import torch
from field import lines, settings, trainer

from flowgrpo.flow.methods.objectives.policy_gradient import KlMask, LossInputs

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
