"""Silent servers are not asked again in a rollout; a held-out prompt that a reward cannot read costs no other value."""

import math

import pytest
import torch

from flowgrpo.data.prompts import Row
from flowgrpo.training.scoring.scorer import Scorer
from rewards.base import NoAnswer, Reward, RewardError

ROWS = [Row("a", 0, {}), Row("b", 1, {})]


class Server:
    """Answers as it is told, call by call: with numbers, or with an error."""

    remote = True

    def __init__(self, *answers):
        self.answers, self.asked = iter(answers), 0

    def __call__(self, samples, prompts, **columns):
        self.asked += 1
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return [answer] * len(prompts)


def scored(server, calls):
    with Scorer([Reward("served", server)]) as scorer:
        waiting = [scorer.submit(torch.zeros(2, 3, 4, 4), ROWS) for _ in range(calls)]
        return [wait() for wait in waiting]


def test_after_two_calls_without_an_answer_no_more_are_made_until_the_next_rollout(caplog):
    server = Server(1.0, NoAnswer("silent"), NoAnswer("silent"), 2.0)
    found = scored(server, 6)
    assert server.asked == 3
    assert [scores.lost.tolist() for scores in found] == [[False] * 2] + [[True] * 2] * 5
    assert "the reward 'served' was not asked any more; 6 more samples are dropped" in caplog.text
    assert scored(server, 1)[0].values.tolist() == [[2.0], [2.0]]


@pytest.mark.parametrize("between", [1.0, RewardError("wrong request")])
def test_a_server_that_answers_between_whatever_it_is_asked_on(between, caplog):
    server = Server(NoAnswer("silent"), between, NoAnswer("silent"), 1.0)
    scored(server, 4)
    assert server.asked == 4
    assert "not asked any more" not in caplog.text


def reads_reds(images, prompts):
    """A reward that refuses a whole call for one prompt."""
    if any("red" not in prompt for prompt in prompts):
        raise ValueError("cannot read")
    return [1.0] * len(prompts)


def test_a_reward_that_fails_on_one_held_out_prompt_loses_nothing_else(caplog):
    rows = [Row(f"a {colour} circle", i, {}) for i, colour in enumerate(("red", "blue", "red"))]
    steady = Reward("steady", lambda images, prompts: [2.0] * len(prompts))
    with Scorer([steady, Reward("reads", reads_reds)]) as scorer:
        values = scorer.submit_apart(torch.zeros(3, 3, 4, 4), rows)().tolist()
        together = scorer.submit(torch.zeros(3, 3, 4, 4), rows)()
    assert [first for first, _ in values] == [2.0, 2.0, 2.0]
    assert [second for _, second in values] == pytest.approx([1.0, math.nan, 1.0], nan_ok=True)
    assert "its 1 sample is dropped" in caplog.text
    assert together.lost.all()  # rewards of training are summed, so a sample without one has none
