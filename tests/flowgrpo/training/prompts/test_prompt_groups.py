"""The sizes and weights of an iteration's groups, from what their prompts gave before."""

import pytest
import torch
from field import lines, settings, trainer

from flowgrpo.schema.schedule import HalfLife
from flowgrpo.training.prompts.prompt_groups import build_groups
from flowgrpo.training.prompts.prompt_statistics import PromptStats


def known(rewards):
    """Statistics of prompts 0, 1, ... that gave so many rewards."""
    stats = PromptStats(HalfLife())
    for prompt, each in enumerate(rewards):
        stats.add([prompt] * len(each), torch.tensor(each, dtype=torch.float64), 0)
    return stats


def test_the_variances_are_those_of_the_rewards_and_of_two_more():
    stats = known([[3.0, 5.0] * 4, [7.0] * 8, []])
    mean = 8 / 16  # of all rewards known, about the means of their prompts
    expected = [(8 + 2 * mean) / 10, 2 * mean / 10, mean]
    assert stats.variances(range(3), 0).tolist() == pytest.approx(expected)
    assert stats.variances(range(3), 16).tolist() == pytest.approx([(2 + 2 * mean) / 4, 2 * mean / 4, mean])
    assert known([[7.0] * 8, []]).variances(range(2), 0).tolist() == [1, 1]
    assert known([[], []]).variances(range(2), 0).tolist() == [1, 1]


def test_samples_move_by_the_root_of_the_variance_and_prompts_weigh_alike(tmp_path):
    """Spreads of 1 and 3, on any scale of the rewards, of 64 samples in 2 groups."""
    choices = {"train__groups": 2, "train__group_size": 32, "train__updates": 1}
    config = settings(tmp_path, prompts__pick={"budget": "root_variance", "least": 0.1}, **choices)
    stats = known([[9.0, 11.0] * 5000, [97.0, 103.0] * 5000])
    groups = build_groups(config, 2, stats, 0)
    assert dict(zip(groups.prompts, groups.roots, strict=True)) == {0: 16, 1: 48}
    assert (groups.weights * torch.tensor(groups.roots)).tolist() == pytest.approx([32, 32])
    bounded = settings(tmp_path, prompts__pick={"budget": "root_variance", "least": 0.75}, **choices)
    assert sorted(build_groups(bounded, 2, stats, 0).roots) == [24, 40]
    assert build_groups(bounded, 2, known([[], []]), 0).roots == [32, 32]


def test_a_run_with_budgets_by_variance_samples_as_much_as_one_without(tmp_path):
    runs = [trainer(settings(tmp_path / name, prompts__pick__budget=name)) for name in ("equal", "root_variance")]
    for run in runs:
        run.run()
    spent = [[line["cost/decoded"] for line in lines(run)] for run in runs]
    assert spent[0] == spent[1]
    sizes = [run.groups(run.done).roots for run in runs]
    assert (set(sizes[0]), sum(sizes[0])) == ({8}, sum(sizes[1]))
    assert len(set(sizes[1])) > 1
