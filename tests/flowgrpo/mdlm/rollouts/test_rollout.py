"""Rewards of texts on other machines: asked for finished groups while the model decodes others."""

import threading

import pytest
import torch

from flowgrpo import config
from flowgrpo.data.prompts import Row
from flowgrpo.mdlm.models.load import load_predictor
from flowgrpo.mdlm.policy import TextPolicy
from flowgrpo.mdlm.rollouts.rollout import rollout
from flowgrpo.training.prompts.prompt_groups import Groups
from flowgrpo.training.run.out_of_memory_error import OutOfMemory
from rewards import Reward

PROMPTS = ["compute 3+4:", "compute 9*8-10:", "make 41 from 3 7 20:"]
SIZE = 4
TREE = {"preset": "d_tree_rpo", "decoder": {"name": "low_confidence", "steps": 2}, "tree": {"splits": [0.5]}}
CHAINS = {"preset": "diffu_grpo", "decoder": {"name": "threshold", "committer": {"threshold": 0.5}}}


class Reporting:
    """A reward that writes down the texts of its calls; `remote` says whether it waits for another machine."""

    def __init__(self, remote, fails=None):
        self.remote, self.fails, self.asked, self.first = remote, fails, [], threading.Event()

    def __call__(self, texts, prompts):
        self.asked.append((list(texts), list(prompts)))
        self.first.set()
        if self.fails is not None and prompts[0] == PROMPTS[1]:
            raise self.fails
        return [float(len(text)) for text in texts]


@pytest.fixture(scope="module")
def policy():
    return TextPolicy(*load_predictor("digits"), 20)


def rolled(policy, reward, algorithm=CHAINS, rows=5):
    """Answer each prompt `SIZE` times in calls of `rows` answers, and score the answers."""
    train = {"groups": len(PROMPTS), "group_size": SIZE, "updates": 1, "rollout_batch": rows}
    chosen = config.validate({"kind": "mdlm", "model": {"path": "digits"}, "algorithm": algorithm, "train": train})
    members = [(group, index) for group in range(len(PROMPTS)) for index in range(SIZE)]
    return rollout(
        chosen,
        policy,
        iteration=0,
        groups=Groups([0, 1, 2], [SIZE] * 3, torch.ones(3)),
        members=members,
        rows=[Row(PROMPTS[group], index) for group, index in members],
        rewards=[Reward("length", reward)],
        decoder=chosen.algorithm.decoder.build(
            policy.length, policy.eos_id, "algorithm.decoder", predictor=policy.predictor
        ),
        schedule=None,
    )


@pytest.mark.parametrize("rows", [1, 5, 12])
@pytest.mark.parametrize("algorithm", [CHAINS, TREE], ids=["chains", "trees"])
def test_remote_rewards_are_asked_the_same_while_the_model_decodes(policy, algorithm, rows):
    here, there = Reporting(remote=False), Reporting(remote=True)
    batch, other = rolled(policy, here, algorithm, rows), rolled(policy, there, algorithm, rows)
    assert torch.equal(batch.completions.rollout.ids, other.completions.rollout.ids)
    assert batch.completions.texts == other.completions.texts
    assert torch.equal(batch.scores.values, other.scores.values)
    assert here.asked == there.asked
    assert [prompts for _, prompts in there.asked] == [[prompt] * SIZE for prompt in PROMPTS]


@pytest.mark.parametrize("algorithm", [CHAINS, TREE], ids=["chains", "trees"])
def test_the_first_group_is_scored_while_the_model_decodes_the_last(policy, algorithm):
    rolled(policy, counting := Reporting(remote=False), algorithm)
    reward, calls, last = Reporting(remote=True), [], []

    def count(_, given):
        calls.append(len(given[0]))

    def wait(_, given):
        last.append(len(given[0]))
        assert len(last) < len(calls) or reward.first.wait(60), "no reward was called while the model decodes"

    for hook in (count, wait):
        watching = policy.predictor.model.register_forward_pre_hook(hook)
        rolled(policy, reward if hook is wait else counting, algorithm)
        watching.remove()
    assert last == calls


def test_out_of_memory_of_a_reward_ends_the_rollout_with_the_same_message(policy):
    messages = []
    for remote in (False, True):
        with pytest.raises(OutOfMemory) as raised:
            rolled(policy, Reporting(remote, MemoryError("Unable to allocate 3.00 GiB")))
        messages.append(str(raised.value).partition(" asked for")[0])
    assert messages[0] == messages[1]
    assert "the reward 'length' (3.00 GiB" in messages[0]
