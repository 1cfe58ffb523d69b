"""A server that does not answer is left alone for the rest of a rollout, and asked again in the next."""

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
