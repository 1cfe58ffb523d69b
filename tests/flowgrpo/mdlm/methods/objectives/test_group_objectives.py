import math
from dataclasses import replace

import pytest
import torch

from flowgrpo.mdlm.methods.objectives.group_objectives import Contrast, Regression
from flowgrpo.mdlm.methods.objectives.objective import Divergence, LossInputs

GAPS = [[0.4, 0.2], [-0.3, 0.1], [0.6, 0.0], [0.2, -0.4], [0.1, 0.0]]  # of the tokens of five answers; the last has one
ADVANTAGE = [1.0, -1.0, 0.5, 0.5, -0.5]
GROUP = [7, 2, 7, 2, 7]


def inputs(token_weight):
    gap = torch.tensor([GAPS], dtype=torch.float64)
    weight = torch.ones_like(gap)
    weight[0, 4, 1] = 0
    return LossInputs(
        new=-1.5 + gap,
        old=torch.full_like(gap, -1.5),
        reference=torch.full_like(gap, -1.5),
        weight=weight,
        view_weight=torch.ones(1),
        length=weight[0].sum(1),
        advantage=torch.tensor(ADVANTAGE, dtype=torch.float64),
        group=torch.tensor(GROUP),
        rank=torch.zeros(5),
        token_weight=torch.tensor(token_weight, dtype=torch.float64),
        active_views=torch.ones(1, 5, dtype=torch.bool),
        order=torch.zeros(5, 2, dtype=torch.long),
    )


@pytest.mark.parametrize(
    ("normalised", "log_ratio"), [(True, [0.3, -0.1, 0.3, -0.1, 0.1]), (False, [0.6, -0.2, 0.6, -0.2, 0.1])]
)
def test_the_loss_of_a_group_weighs_as_much_as_its_answers_together(normalised, log_ratio):
    """By hand, with the members of two groups in turns, and token weights that are not alike."""
    weights = [[0.1, 0.2], [0.3, 0.0], [0.1, 0.1], [0.05, 0.05], [0.1, 0.0]]
    expected = 0.0
    for group in (7, 2):
        own = [i for i in range(5) if GROUP[i] == group]
        mean = sum(log_ratio[i] for i in own) / len(own)
        loss = sum((ADVANTAGE[i] - 4 * (log_ratio[i] - mean)) ** 2 for i in own) / len(own)
        expected += sum(sum(weights[i]) for i in own) * loss
    objective, case = Regression(scale=4.0, normalised=normalised), inputs(weights)
    assert objective.loss(case).item() == pytest.approx(expected)
    assert objective.log_ratio(case).tolist() == pytest.approx(log_ratio)
    assert not objective.stopped(case).any()
    kl = Divergence(beta=0.5, form="k2")
    pulled = Regression(scale=4.0, normalised=normalised, kl=kl).loss(case)
    assert pulled.item() == pytest.approx(expected + kl.loss(case).item())
    assert kl.loss(case) > 0


def test_a_contrast_scores_answers_by_their_log_probability_per_token():
    """Not by their log ratios: old tokens are at -1.5. Answers 0 and 2 are good, 4 is bad; of 1 and 3 in turn 3 is good."""
    case = inputs([[0.5, 0.0]] * 5)
    s = [-1.5 + 0.3, -1.5 - 0.1, -1.5 + 0.3, -1.5 - 0.1, -1.5 + 0.1]
    old = torch.tensor([[[-1.5, -1.5], [-0.5, -0.5], [-1.5, -1.5], [-1.5, -1.5], [-1.5, -1.5]]], dtype=torch.float64)
    case = replace(case, old=old, new=old + case.new + 1.5)
    s[1] += 1.0
    kl = 0.1  # of the second group: its log ratios are -0.1
    expected = -1.5 * ((s[0] + s[2]) / 2 - s[4]) - 1.0 * (s[3] - s[1]) + 1.0 * 5 * (kl - 0.02) * kl
    assert Contrast(limit=0.02, penalty=5.0).loss(case).item() == pytest.approx(expected)
    free = case.new.clone().requires_grad_()
    case = replace(case, new=free, advantage=torch.tensor([1.0, -1.0, -1.0, -1.0, -1.0], dtype=torch.float64))
    (slope,) = torch.autograd.grad(Contrast(temperature=0.5, penalty=0.0).loss(case), free)
    bad = [math.exp(s[i] / 0.5) for i in (2, 4)]
    per_token = [-1.5 / 2, 0, 1.5 * bad[0] / sum(bad) / 2, 0, 1.5 * bad[1] / sum(bad)]
    assert slope[0, :, 0].tolist() == pytest.approx(per_token)


def test_a_contrast_ranks_good_answers_by_the_second_reward():
    """Answers 0 and 2 are good, of second rewards 0.4 and 0.1; the temperature is 0.2. The bad one's has no effect."""
    case = replace(inputs([[0.5, 0.0]] * 5), rank=torch.tensor([0.4, 9.0, 0.1, 9.0, 9.0], dtype=torch.float64))
    free = case.new.clone().requires_grad_()
    objective = Contrast(rank_by="brevity", rank_temperature=0.2, penalty=0.0)
    (slope,) = torch.autograd.grad(objective.loss(replace(case, new=free)), free)
    weights = [math.exp(0.4 / 0.2), math.exp(0.1 / 0.2)]
    first, third = (-1.5 * weight / sum(weights) / 2 for weight in weights)
    assert slope[0, :, 0].tolist() == pytest.approx([first, 0.5, third, -0.5, 1.5])
