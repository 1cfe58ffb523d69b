"""The second stage of an iteration: sizes by DARS's numbers, and shares and parts that stay those of the first."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from field import settings

from flowgrpo.errors import InputError
from flowgrpo.flow.config import Config
from flowgrpo.schema.schedule import SecondStage
from flowgrpo.training.distributed.assignment import assign_minibatches, assign_roots
from flowgrpo.training.distributed.data_shard import DataShard
from flowgrpo.training.prompts.prompt_groups import Groups, add_second_stage
from flowgrpo.training.prompts.second_stage import check_rewards, most_roots
from rewards import Reward

SOLVED = [[0.0] * 8, [1.0] + [0.0] * 7, [1.0] * 2 + [0.0] * 6, [1.0] * 3 + [0.0] * 5, [1.0] * 4 + [0.0] * 4]


def staged(tmp_path, rewards, sizes=None, **overrides):
    """Return the groups after the rewards of their first samples, of one prompt each."""
    config = settings(
        tmp_path,
        **{"prompts__pick__second_stage": "equal", "train__groups": len(rewards), "train__updates": 1, **overrides},
    )
    roots = config.algorithm.roots(config.train.group_size)
    first = Groups(list(range(len(rewards))), sizes or [roots] * len(rewards), torch.ones(len(rewards)))
    told = [(group, reward) for group, each in enumerate(rewards) for reward in each]
    return config, add_second_stage(config, first, told)


def test_the_sizes_are_those_of_the_paper_s_code(tmp_path):
    """24 instead of 27 for none of 8: a group of 32 is the largest."""
    _, groups = staged(tmp_path, SOLVED)
    assert groups.first == [8] * 5
    assert [size - 8 for size in groups.roots] == [24, 11, 3, 1, 0]
    _, groups = staged(tmp_path, SOLVED, prompts__pick__second_stage={"form": "hardness", "most": 8})
    assert [size - 8 for size in groups.roots] == [56, 24, 8, 3, 0]
    _, groups = staged(tmp_path, SOLVED, prompts__pick__second_stage={"form": "equal", "most": 8})
    assert [size - 8 for size in groups.roots] == [27, 11, 3, 1, 0]


@pytest.mark.parametrize("form", ["equal", "hardness"])
def test_the_sum_of_all_advantages_is_just_what_the_form_asks_for(form):
    """By fractions, for every success rate of groups of 2 to 24: with one sample less the sum is smaller."""
    stage = SecondStage(form=form)
    for number in range(2, 25):
        for good in range(number + 1):
            further = stage.further(good / number, number)
            p = Fraction(max(2 * good, 1), 2 * number)
            if 2 * good >= number:
                assert further == 0
                continue
            aim = Fraction(number, 2) if form == "equal" else number * (1 - p)
            with_it, with_less = (2 * p * (1 - p) * (number + n) for n in (further, further - 1))
            assert with_it >= aim > with_less
        sizes = [stage.further(good / number, number) for good in range(number + 1)]
        assert all(one >= other for one, other in pairwise(sizes))


def test_rewards_of_any_scale_count_from_worst_to_best_and_lost_ones_do_not(tmp_path):
    """Means of 1/8 and 3/8, above the best, below the worst, none, and 1/4 where half are not finite."""
    rewards = [[1.5] * 4, [3.0, 2.0] * 2, [9.0] * 4, [-9.0] * 4, [math.nan] * 4, [2.0, math.nan, 2.0, math.inf]]
    pick = {"second_stage": "equal", "worst": 1.0, "best": 5.0}
    _, groups = staged(tmp_path, rewards, prompts__pick=pick)
    by_hand = [SecondStage().further(p, 8) for p in (1 / 8, 3 / 8, 1.0, 0.0, 1.0, 1 / 4)]
    assert by_hand == [11, 1, 0, 27, 0, 3]
    assert [size - 8 for size in groups.roots] == [11, 1, 0, 24, 0, 3]


def test_further_trees_are_whole_and_groups_of_unequal_sizes_have_their_own_limits(tmp_path):
    """tempflow grows 6 samples from a root: 24 are 4 roots, and 20 further samples 4 more."""
    tempflow = {"algorithm": {"preset": "tempflow"}, "train__group_size": 24}
    rewards = [[1.0] * good + [0.0] * (24 - good) for good in (0, 4, 8, 10)]
    config, groups = staged(tmp_path, rewards, **tempflow)
    further = [SecondStage().further(good / 24, 24) for good in (0, 4, 8, 10)]
    assert further == [271, 20, 3, 1]
    assert groups.roots == [16, 4 + 4, 4 + 1, 4 + 1]
    assert most_roots(config) == 16
    _, groups = staged(tmp_path, [[0.0] * 4, [0.0] * 12], [4, 12], prompts__pick__second_stage={"most": 1.3})
    assert groups.roots == [5, 15]


@pytest.mark.parametrize(
    ("split", "algorithm"),
    [("groups", "flow_grpo"), ("samples", "flow_grpo"), ("edges", "flow_grpo"), ("groups", "dpo")],
)
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_each_stage_is_shared_out_by_itself_and_no_part_of_the_first_moves(tmp_path, split, algorithm, processes):
    choices = {"algorithm": {"preset": algorithm}, "train__split": split, "train__updates": 2}
    config, groups = staged(tmp_path, [*SOLVED, SOLVED[0]], **choices)
    assert groups.roots == [32, 19, 11, 9, 8, 32]
    plain = Groups(groups.prompts, groups.first, groups.weights)
    before, parts = (assign_minibatches(config, each, 3) for each in (plain, groups))
    assert [of_group[:8] for of_group in parts] == before
    assert [len(of_group) for of_group in parts] == groups.roots
    if split == "groups":
        assert all(len({*of_group}) == 1 for of_group in parts)
    first, second = (
        [assign_roots(config, each, iteration=3, shard=DataShard(rank, processes)).own for rank in range(processes)]
        for each in (plain, groups)
    )
    assert sorted(member for own in second for member in own) == [
        (group, index) for group, size in enumerate(groups.roots) for index in range(8, size)
    ]
    if split == "edges" or algorithm == "dpo":  # whole groups stay where they are
        homes = [{group: rank for rank, own in enumerate(stage) for group, _ in own} for stage in (first, second)]
        assert homes[1].items() <= homes[0].items()
        return
    for part in range(2):
        counts = [sum(parts[group][index] == part for group, index in own) for own in second]
        assert max(counts) - min(counts) <= 1


REFUSED = [
    ({"run__processes": 2, "run__generators": 1}, "run.generators=1, since a generator knows the rewards of its own"),
    ({"run__engine": {"url": "http://localhost:1"}}, "run.engine, since an engine reports on one rollout"),
    ({"train__draft": {"pool": 2, "call": {}}}, "train.draft, since its starts are chosen once"),
    ({"algorithm": {"preset": "flow_grpo", "hints": "noised"}}, "algorithm.hints=noised, since both help groups"),
    (
        {
            "algorithm": {
                "preset": "flow_grpo",
                "tree": {"stop": {"step": 2}},
                "baseline": {"name": "leave_one_out", "std": "none"},
            }
        },
        "algorithm.tree.stop, since stopped chains have no reward",
    ),
    ({"algorithm": {"preset": "rwr"}, "data": {"groups": "somewhere"}}, "data.groups, since its samples are there"),
    ({"prompts__pick__second_stage": {"most": 1.1}}, "most: 1.1 x 8 leaves no room for another sample, take 1.13"),
    (
        {"algorithm": {"preset": "tempflow"}, "train__group_size": 24, "prompts__pick__second_stage": {"most": 1.2}},
        "most: 1.2 x 4 leaves no room for another tree, take 1.25",
    ),
    ({"train__replay": "never"}, "with prompts.pick.second_stage no update can use the graphs of a rollout"),
]


@pytest.mark.parametrize(("overrides", "sentence"), REFUSED)
def test_what_does_not_go_with_a_second_stage_is_refused(tmp_path, overrides, sentence):
    given = {"prompts__pick__second_stage": "equal", **overrides}
    with pytest.raises(InputError, match=sentence):
        settings(tmp_path, **given)


def test_a_reward_that_compares_a_group_is_refused(tmp_path):
    rewards = [Reward("alone", len), Reward("ranked", len, group_wise=True)]
    check_rewards(settings(tmp_path), rewards)
    staged = settings(tmp_path, prompts__pick__second_stage="hardness")
    assert isinstance(staged, Config)
    check_rewards(staged, rewards[:1])
    with pytest.raises(InputError, match=r"rewards: ranked compares the samples of a group, which come in two stages"):
        check_rewards(staged, rewards)
