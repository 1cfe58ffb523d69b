"""What is remembered of each prompt's rewards, forgotten by iterations or by how far the policy moved."""

import math

import ahead
import pytest
import torch
from field import differing, lines, resumed, settings, trainer
from pair import pair

from flowgrpo.errors import InputError
from flowgrpo.schema.schedule import HalfLife
from flowgrpo.training.prompts.prompt_statistics import PromptStats

RATIOS = {"by": "log_ratio", "after": 0.02}
CHOICES = {"train__half_life": RATIOS, "algorithm__baseline": "tracker", "train__iterations": 6}


def test_history_forgets_by_half_lives():
    stats = PromptStats(HalfLife(after=2.0))
    assert stats.past([7], 0).mean.isnan().all()
    stats.add([7, 7, 7], torch.tensor([1.0, 0.0, math.nan]), 0)
    assert [x.tolist() for x in stats.counts([7, 8], 0)] == [[2, 0], [1, 0]]
    assert [x.item() for x in stats.counts([7], 4)] == [0.5, 0.25]
    stats.add([7], torch.tensor([1.0]), 4)
    assert stats.past([7], 4).mean.item() == pytest.approx((0.25 + 1) / 1.5)
    other = PromptStats(HalfLife(after=2.0))
    other.restore(stats.state())
    assert other.counts([7], 9)[0] == stats.counts([7], 9)[0]
    assert other.past([7], 9).square == stats.past([7], 9).square > 0
    other.restore({"7": [2.0, 1.0, 9]})  # of an earlier version
    assert [each.item() for each in (other.past([7], 9).mean, other.past([7], 9).square)] == [0.5, 0]


def visited(half_life, moves, visits):
    """Statistics after iterations that moved the policy so far, of a prompt that is visited in some of them."""
    stats = PromptStats(half_life)
    for iteration, moved in enumerate(moves):
        if iteration in visits:
            stats.add([0, 0], torch.tensor([iteration / 8, 1.0]), iteration)
        stats.move(moved)
    return [x.item() for x in (*stats.counts([0], len(moves)), stats.past([0], len(moves)).square)]


def test_constant_log_ratios_forget_as_iterations_do():
    by_iterations = visited(HalfLife(after=8.0), [0.25] * 9, {0, 3, 4})
    assert visited(HalfLife(by="log_ratio", after=2.0), [0.25] * 9, {0, 3, 4}) == by_iterations
    assert visited(HalfLife(by="log_ratio", after=2.0), [0.5] * 9, {0, 3, 4}) != by_iterations


def test_what_does_not_move_forgets_nothing():
    never = visited(HalfLife(after=1e300), [0.0] * 9, {0, 3, 4})
    assert visited(HalfLife(by="log_ratio", after=1e-3), [0.0, None, math.nan, *[0.0] * 6], {0, 3, 4}) == never


def test_what_is_kept_from_visit_to_visit_is_bounded():
    """SPO's code: 2^(-D / 0.06), cut to between 0.875 and 0.96."""
    for moved, kept in ((0.0, 0.96), (0.006, 2**-0.1), (1.0, 0.875)):
        stats = PromptStats(HalfLife(by="log_ratio", after=0.06, keep=[0.875, 0.96]))
        stats.add([0, 0], torch.tensor([1.0, 0.0]), 0)
        assert stats.seen[0][:2] == (2, 1)  # both are of one visit
        stats.move(moved)
        stats.add([0, 0], torch.tensor([1.0, 1.0]), 1)
        assert stats.seen[0][:2] == pytest.approx((2 * kept + 2, kept + 2))


def test_the_age_of_a_run_is_the_sum_of_its_mean_log_ratios(tmp_path):
    run = trainer(settings(tmp_path, **CHOICES))
    run.run()
    assert run.prompt_stats.odometer == sum(line["policy/mean_abs_log_ratio"] for line in lines(run)) > 0


def test_a_resumed_run_forgets_on_to_the_bit(tmp_path):
    whole = trainer(settings(tmp_path / "a", **CHOICES))
    whole.run()
    trainer(settings(tmp_path / "b", **CHOICES | {"train__iterations": 3})).run()
    rest = resumed(trainer(settings(tmp_path / "b", **CHOICES)), 3)
    assert lines(rest) == lines(whole)
    assert not differing(whole, rest)
    assert (rest.prompt_stats.odometer, rest.prompt_stats.seen) == (
        whole.prompt_stats.odometer,
        whole.prompt_stats.seen,
    )


def test_two_processes_agree_on_the_age(tmp_path):
    (first, *known), (_, *other) = pair(ahead.forgetting, tmp_path)
    assert known == other
    alone, age, seen = ahead.forgot(tmp_path / "alone")
    assert known[0] == pytest.approx(age)
    assert {prompt: pytest.approx(stats) for prompt, stats in seen.items()} == known[1]
    assert len(first) == len(alone)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        (
            {"train__half_life": {"by": "log_ratio"}},
            r"^train\.half_life\.after: log ratios have no typical size, so give the sum that halves a reward",
        ),
        (
            {"train__half_life": {"keep": [0.5, 0.2]}},
            r"^train\.half_life\.keep: \[0\.5, 0\.2\] are not in ascending order; take \[0\.2",
        ),
        ({"train__half_life": 0}, r"^train\.half_life\.after: 0 is wrong"),
        ({"train__half_life": RATIOS, "train__updates": 1}, r"all ratios are 1, take train\.updates=2 or iterations$"),
        (
            {"train__half_life": RATIOS, "algorithm__preset": "adaptive"},
            "the tree adaptive counts ages in iterations; take another tree",
        ),
        ({"train__half_life": RATIOS, "algorithm__preset": "pepg"}, r"take anchor=old with old\.most=0 or iterations$"),
    ],
)
def test_settings_without_such_ratios_are_refused(tmp_path, choices, words):
    with pytest.raises(InputError, match=words):
        settings(tmp_path, **choices)


def test_rollouts_of_an_earlier_policy_have_ratios_in_one_update(tmp_path):
    assert (
        settings(tmp_path, train__half_life=RATIOS, train__updates=1, run__staleness=1).train.half_life.by
        == "log_ratio"
    )
