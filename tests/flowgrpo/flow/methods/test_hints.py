"""Noised good samples, the ladder of a prompt, and settings that do not go with hints."""

from itertools import pairwise

import pytest
import torch
from field import settings

from flowgrpo.errors import InputError
from flowgrpo.flow.methods import hints
from flowgrpo.flow.methods.hints import choose_rung, climb, find_rungs, noised, start_ladder

RUNGS = 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_sigma_1_a_start_is_the_noise_itself_to_the_bit(dtype):
    noise = tuple(torch.randn(3, 4, dtype=dtype) for _ in range(2))
    winner = tuple(100 * torch.randn(3, 4, dtype=dtype) for _ in range(2))
    assert all(torch.equal(x, xi) for x, xi in zip(noised(winner, 1.0, noise), noise, strict=True))
    assert all(torch.equal(x, good) for x, good in zip(noised(winner, 0.0, noise), winner, strict=True))


def test_a_start_is_what_the_flow_would_have_made_of_the_sample():
    """Its law at sigma has mean (1 - sigma) x and std sigma."""
    winner = (torch.tensor([2.0, -1.0], dtype=torch.float64),)
    starts = torch.stack([noised(winner, 0.25, (torch.randn(2, dtype=torch.float64),))[0] for _ in range(4000)])
    assert torch.allclose(starts.mean(0), 0.75 * winner[0], atol=0.02)
    assert torch.allclose(starts.std(0), torch.full((2,), 0.25, dtype=torch.float64), atol=0.02)


def test_rungs_lie_within_the_bounds_and_above_the_last_trained_step():
    sigmas = (1.0, 0.9, 0.7, 0.5, 0.3, 0.1, 0.0)
    assert find_rungs(sigmas, [0.2, 0.9], 5) == [1, 2, 3, 4]
    assert find_rungs(sigmas, [0.2, 0.9], 2) == [1, 2]
    assert find_rungs(sigmas, [0.0, 1.0], 5) == [1, 2, 3, 4, 5]  # never noise alone, never data alone
    assert find_rungs(sigmas, [0.6, 0.65], 5) == []


def walked(helps, visits, rungs=RUNGS):
    """The rungs of a prompt's visits, and its bounds after them; `helps` tells whether a rung succeeds at a visit."""
    bounds, seen = start_ladder(rungs), []
    for visit in range(visits):
        seen.append(choose_rung(bounds, rungs))
        bounds = climb(bounds, seen[-1], helped=helps(seen[-1], visit), rungs=rungs)
    return seen, bounds


@pytest.mark.parametrize("weakest", range(RUNGS))
def test_visits_bisect_to_the_weakest_hint_that_helps(weakest):
    seen, _ = walked(lambda rung, visit: rung >= weakest, 12)
    assert seen.index(weakest) <= 4  # 9 rungs
    assert set(seen[6:]) <= {weakest - 1, weakest}  # it then tries the next weaker hint, and comes back


def test_a_hint_fades_as_it_succeeds_and_returns_as_it_fails():
    seen, bounds = walked(lambda rung, visit: visit < 2 or visit >= 8 or rung >= 7, 40)
    assert seen[-10:] == [0] * 10
    assert bounds == (-1, 0)
    seen, _ = walked(lambda rung, visit: visit < 20, 40)
    assert seen[19] == 0
    assert seen[20:29] == list(range(RUNGS))
    assert seen[-5:] == [RUNGS - 1] * 5
    assert all(abs(a - b) <= 1 for a, b in pairwise(seen[5:]))


def test_a_single_rung_is_always_taken():
    for helps in (True, False):
        assert set(walked(lambda rung, visit, helps=helps: helps, 9, rungs=1)[0]) == {0}


def test_a_plan_that_trains_fewer_steps_caps_the_hint():
    bounds = (6, 8)
    assert choose_rung(bounds, 3) == 2
    assert climb(bounds, 2, helped=False, rungs=RUNGS) == bounds  # nothing new: the sixth was too weak already
    assert climb(bounds, 2, helped=True, rungs=RUNGS) == (0, 2)


NOISED = {"algorithm__hints": "noised"}


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            {"algorithm__preset": "awm"},
            "algorithm.hints: a noised start leaves only later steps to train, but elbo trains",
        ),
        (
            {"algorithm__preset": "branch_grpo", "train__group_size": 16},
            "algorithm.hints: hints replace a share of a group's roots, but branch has few roots",
        ),
        (
            {"algorithm__baseline": "tracker"},
            "algorithm.hints: tracker compares with earlier rewards, which had no hints",
        ),
        (
            {"algorithm__hints": {"name": "noised", "replace": 0.1}},
            "algorithm.hints.replace: 0.1 of 8 roots is less than 2",
        ),
        (
            {"algorithm__hints": {"name": "noised", "ladder": [0.9, 0.2]}},
            "algorithm.hints.ladder: 0.9 is above 0.2, write the least first",
        ),
        (
            {"algorithm__hints": {"name": "noised", "width": 4}},
            "algorithm.hints.width: source winner does not read it, take source search or teacher",
        ),
        (
            {"algorithm__hints": {"name": "noised", "source": "search", "column": "good"}},
            "algorithm.hints.column: source search does not read it, take source data",
        ),
        (
            {"rewards": ["shapes", "jpeg_size"]},
            "algorithm.hints.reward: name the reward that measures success, one of shapes, jpeg_size",
        ),
        ({"train__draft": {}}, "train.draft: it chooses the starts of a group; take null, or algorithm.hints=none"),
        ({"run__staleness": 1}, "run.staleness: hints follow the last iteration's rewards; take 0"),
        (
            {"run__generators": 1, "run__processes": 2, "run__staleness": 1},
            "run.staleness: hints follow the last iteration's rewards; take 0",
        ),
        ({"run__sharding": "fsdp2"}, "run.sharding: processes call the model unequally often with hints; take none"),
    ],
)
def test_what_does_not_go_with_hints_is_refused(tmp_path, overrides, sentence):
    with pytest.raises(InputError) as error:
        settings(tmp_path, **{**NOISED, **overrides})
    assert sentence in str(error.value)


def test_groups_stay_whole_and_rollouts_keep_no_graphs(tmp_path):
    chosen = settings(tmp_path, **NOISED)
    assert chosen.algorithm.keeps_groups_whole == "algorithm.hints=noised"
    assert chosen.graph_hindrance == "algorithm.hints=noised"
    assert settings(tmp_path).algorithm.keeps_groups_whole is None


class Scheduled:
    """A policy that has only a schedule."""

    def __init__(self, sigmas, pins=False):
        self.sigmas, self.pins = sigmas, pins


def test_a_schedule_without_a_rung_is_refused(tmp_path):
    chosen = settings(tmp_path, algorithm__hints={"name": "noised", "ladder": [0.55, 0.65]})
    hints.check_policy(chosen, Scheduled((1.0, 0.6, 0.3, 0.0)))
    sentence = r"no sigma of the schedule lies in \[0.55, 0.65\], there are 0.7, 0.3 between"
    with pytest.raises(InputError, match=sentence):
        hints.check_policy(chosen, Scheduled((1.0, 0.7, 0.3, 0.0)))
    for policy in (Scheduled((0.8, 0.6, 0.3, 0.0)), Scheduled((1.0, 0.6, 0.3, 0.0), pins=True)):
        with pytest.raises(InputError, match="does not start from noise alone; take none"):
            hints.check_policy(chosen, policy)


def test_a_visit_moves_the_bounds_by_what_it_tells_alone():
    assert climb((2, 5), 7, helped=True, rungs=RUNGS) == (2, 5)  # that a stronger hint helps was known
    assert climb((3, 4), 3, helped=False, rungs=RUNGS) == (3, 5)
    assert climb((3, 4), 4, helped=True, rungs=RUNGS) == (2, 4)
    assert climb((7, 8), 8, helped=False, rungs=RUNGS) == (8, 9)
