import itertools
import math
import re
import sys

import pytest
import torch
from fakes import endpoint, pictures_of, words_of

import rewards
from rewards import RewardError

VALUES = [0.2, 0.8, 0.4, 0.6]
GROUP = torch.tensor(VALUES).view(4, 1, 1, 1).expand(4, 3, 4, 4)


def brighter(first, second, prompt):
    difference = float(first.mean() - second.mean())
    return 0.5 if abs(difference) < 1e-6 else float(difference > 0)


def preference(compare, **options):
    return rewards.load("preference", options={"compare": compare, **options})


@pytest.mark.parametrize("both_orders", [True, False])
def test_an_order_gives_its_ranks_as_win_rates(both_orders):
    reward = preference(brighter, both_orders=both_orders)
    assert reward.group_wise
    assert reward(GROUP, ["a"] * 4, {}).tolist() == pytest.approx([0, 1, 1 / 3, 2 / 3])
    assert reward.function.rounds == (12 if both_orders else 6)  # 4 * 3 / 2 pairs
    assert reward.function.undecided == 0


def test_the_first_place_is_worth_nothing_in_both_orders_and_everything_as_published():
    for both_orders, rates in ((True, [0.5] * 4), (False, [1, 2 / 3, 1 / 3, 0])):
        always_first = preference(lambda first, second, prompt: 1.0, both_orders=both_orders)
        assert always_first(GROUP, ["a"] * 4, {}).tolist() == pytest.approx(rates)


def test_a_bias_that_sometimes_wins_is_halved():
    # The first is chosen unless the second is brighter by more than 0.3.
    def biased(first, second, prompt):
        return float(second.mean() - first.mean() <= 0.3)

    wins = [0.0] * 4
    for i, j in itertools.permutations(range(4), 2):
        won = float(VALUES[j] - VALUES[i] <= 0.3)
        wins[i] += won / 6
        wins[j] += (1 - won) / 6
    assert preference(biased)(GROUP, ["a"] * 4, {}).tolist() == pytest.approx(wins)


def test_ties_and_what_cannot_be_decided_are_half_a_win_each():
    alike = torch.cat([GROUP[:1], GROUP[:1], GROUP[1:2]])
    reward = preference(brighter)
    assert reward(alike, ["a"] * 3, {}).tolist() == [0.25, 0.25, 1.0]
    assert reward.function.undecided == 0
    undecided = preference(lambda first, second, prompt: None)
    assert undecided(GROUP[:3], ["a"] * 3, {}).tolist() == [0.5] * 3
    assert (undecided.function.rounds, undecided.function.undecided) == (6, 6)


def test_degrees_of_preference_are_averaged():
    reward = preference(lambda first, second, prompt: float(0.5 + (first.mean() - second.mean()) / 2))
    expected = [sum(0.5 + (a - b) / 2 for b in VALUES if b != a) / 3 for a in VALUES]
    assert reward(GROUP, ["a"] * 4, {}).tolist() == pytest.approx(expected)


def test_only_several_samples_of_one_prompt_have_a_rate():
    reward = preference(brighter)
    with pytest.raises(ValueError, match="of one prompt, not of 2"):
        reward(GROUP, ["a", "a", "b", "b"], {})
    assert reward(GROUP[:1], ["a"], {}).isnan().all()
    reward.check(torch.rand(3, 8, 8), "a", {})


def test_a_function_in_a_file_compares(tmp_path, monkeypatch):
    (tmp_path / "pairs.py").write_text("def darker(a, b, prompt):\n    return float(a.mean() < b.mean())\n")
    monkeypatch.chdir(tmp_path)
    assert preference("./pairs.py:darker")(GROUP, ["a"] * 4, {}).tolist() == pytest.approx([1, 0, 2 / 3, 1 / 3])
    with pytest.raises(RewardError, match="compare: nothing is named 'drker' there, it has darker"):
        preference("./pairs.py:drker")
    assert "pairs" not in sys.modules


@pytest.mark.parametrize("wrong", [2, -0.1, math.nan, "first"])
def test_a_comparison_that_is_no_share_is_refused(wrong):
    with pytest.raises(RewardError, match="compare returned .*, not a number from 0 to 1 or None"):
        preference(lambda *_: wrong)(GROUP, ["a"] * 4, {})


@pytest.mark.parametrize(("options", "said"), [
    ({}, "needs either an endpoint or a function to compare"),
    ({"endpoint": "http://x", "compare": brighter}, "needs either"),
    ({"compare": brighter, "timeout": 3}, "takes no timeout"),
])  # fmt: skip
def test_either_an_endpoint_or_a_function(options, said):
    with pytest.raises(RewardError, match=said):
        rewards.load("preference", options=options)


def test_an_endpoint_compares_by_what_it_sees():
    questions = []

    def answer(request):
        first, second = (int(picture[0, 0, 0]) for picture in pictures_of(request))
        questions.append(words_of(request))
        better = "1" if first > second else "2"
        return "cannot tell" if {first, second} == {51, 204} else f'{{"answer": "{better}"}}'

    with endpoint(answer) as url:
        reward = rewards.load("preference", options={"endpoint": f"{url}/v1"})
        values = reward(GROUP, ["a lamp"] * 4, {"n": [1] * 4})
    assert values.tolist() == pytest.approx([0.5 / 3, 2.5 / 3, 1 / 3, 2 / 3])
    assert (reward.function.rounds, reward.function.undecided, reward.function.chat.unread) == (12, 2, 2)
    assert all(re.match(r"First:\nSecond:\n[\s\S]*a lamp[\s\S]*\"answer\": X", words) for words in questions)
