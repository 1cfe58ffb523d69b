"""Rewards that are for some rows of the prompts only are tried on those."""

import pytest

from flowgrpo import config
from flowgrpo.commands.model_kinds import KINDS
from flowgrpo.data.prompts import Prompt
from flowgrpo.flow.diagnostics import doctor
from flowgrpo.training.run.run_data import RunData
from rewards import Reward, RewardError

TRAIN = [Prompt("a cat", {"task": "draw"}), Prompt("a sign", {"task": "ocr"}), Prompt("a red sign", {"task": "ocr"})]
EVAL = [Prompt("a dog", {"task": "draw"}), Prompt("2 cups", {"task": "count"}), Prompt("3 cups", {"task": "count"})]


def watching(met, name, **only):
    def reward(samples, prompts, task):
        assert all(own == only.get("task", own) for own in task)
        met.append((name, prompts[0]))
        return [0.5] * len(prompts)

    return Reward(name, reward, only=only)


def settings(kind):
    return config.validate({"kind": kind, "model": {"path": {"flow": "shapes", "mdlm": "digits"}[kind]}})


@pytest.mark.parametrize("kind", KINDS)
def test_each_reward_is_tried_on_the_first_prompt_that_it_is_for(kind):
    met = []
    rewards = [watching(met, "every"), watching(met, "ocr", task="ocr")]
    watched = [watching(met, "count", task="count"), watching(met, "none", task="none")]
    KINDS[kind].setup.check(settings(kind), RunData(TRAIN, EVAL, rewards, watched))
    assert met == [("every", "a cat"), ("ocr", "a sign"), ("every", "a dog"), ("count", "2 cups")]
    broken = Reward("broken", lambda *a: 1 / 0, only={"task": "ocr"})
    with pytest.raises(RewardError, match="the reward 'broken' failed on two synthetic samples: ZeroDivisionError"):
        KINDS[kind].setup.check(settings(kind), RunData(TRAIN, EVAL, [broken]))


def test_the_doctor_samples_a_prompt_for_each_reward(monkeypatch):
    found = [Prompt("long " * 9, {"task": "draw"}), *TRAIN[1:], Prompt("x", {"task": "draw"})]
    monkeypatch.setattr("flowgrpo.data.prompts.load_split", lambda *arguments: found)
    rewards = [watching([], "draw", task="draw"), watching([], "ocr", task="ocr")]
    chosen = doctor._prompts(settings("flow"), rewards)
    assert [prompt.text for prompt in chosen] == ["long " * 9, "a red sign", "x"]
    assert len(doctor._prompts(settings("flow"), rewards[:1])) == 2
