"""Decoding and scoring of a rollout's samples."""

import threading

import pytest
import torch
from field import Network, closeness, differing, lines, resumed, settings, trainer
from grown import SDE, SIGMAS, address_noise

from flowgrpo.data.prompts import Row
from flowgrpo.flow.pipeline.velocity_field import FieldPolicy
from flowgrpo.flow.rollouts.rollout import rollout, score_leaves
from flowgrpo.training.run.out_of_memory_error import OutOfMemory
from rewards import Reward
from samplers.growth import grow
from samplers.plans import branch, chain
from samplers.trees import Root

SPLIT = branch([SDE] * 4, {1}, 3, stochastic={1}, trained={1}, sibling_strength=None, noise_scale=1.0)


def test_groups_share_full_calls_of_the_decoder_and_are_scored_apart():
    roots = [Root(group, 0, Row(str(group), 0)) for group in range(4)]
    start = (torch.zeros(4, 2),)
    tree = grow(SPLIT, SIGMAS, roots, start, lambda x, *_: x, address_noise, 12)
    decoded, scored = [], []

    def decode(leaves, rows):
        decoded.append([row.prompt for row in rows])
        return torch.tensor(leaves, dtype=torch.float32).reshape(-1, 1, 1, 1).expand(-1, 3, 2, 2)

    def place(images, prompts):
        scored.append(prompts)
        return images[:, 0, 0, 0].tolist()

    scores = score_leaves(tree, decode, [Reward("place", place)], 5)
    assert ["".join(rows) for rows in decoded] == ["00011", "12223", "33"]
    assert scored == [[str(group)] * 3 for group in range(4)]
    assert scores.values[:, 0].tolist() == list(range(12))


class Reporting:
    """A reward that writes down its calls; `remote` says whether it waits for another machine."""

    def __init__(self, remote, fails=None):
        self.remote, self.fails, self.prompts, self.first = remote, fails, [], threading.Event()

    def __call__(self, samples, prompts):
        self.prompts.append(list(prompts))
        self.first.set()
        if self.fails is not None and prompts[0] == "1":
            raise self.fails
        return closeness(samples, prompts)


class Waiting(Network):
    """A field that does not evaluate its last rows before a reward was called."""

    called, asked = None, 0

    def forward(self, x, sigma, rows):
        self.asked += len(rows)
        if self.called is not None and rows[0].prompt == "3":
            assert self.called.wait(60), "no reward was called while the model samples"
        return super().forward(x, sigma, rows)


def rolled(plan, rewards, *, waits_for=None, size=3, rows=4):
    """Roll out four groups in calls of `rows`; return the tree, the scores, and the batches of the decoder."""
    field = Waiting()
    field.called = waits_for
    policy, decoded = FieldPolicy(field, (2,), SIGMAS), []
    policy._decode = lambda x: (decoded.append(len(x)), x)[1]
    roots = [Root(group, index, Row(str(group), 10 * group + index)) for group in range(4) for index in range(size)]
    tree, scores = rollout(policy, plan, roots, rewards=rewards, micro_batch=rows, seed=0, iteration=0)
    return tree, scores, decoded


CHAIN = chain([SDE] * 4, range(3), range(3))


@pytest.mark.parametrize("rows", [2, 4, 5, 12])
@pytest.mark.parametrize("plan", [CHAIN, SPLIT], ids=["chain", "split"])
def test_remote_rewards_are_asked_the_same_while_the_model_samples(plan, rows):
    here, there = Reporting(remote=False), Reporting(remote=True)
    tree, scores, decoded = rolled(plan, [Reward("here", here)], rows=rows)
    again, others, batches = rolled(plan, [Reward("there", there)], rows=rows)
    assert torch.equal(scores.values, others.values)
    assert torch.equal(tree.samples[0], again.samples[0])
    assert tree.nodes == again.nodes
    assert tree.leaves == again.leaves
    assert [each.rows for each in tree.evaluations] == [each.rows for each in again.evaluations]
    assert decoded == batches
    assert here.prompts == there.prompts


def test_the_first_group_is_scored_while_the_model_samples_the_last():
    reward = Reporting(remote=True)
    rolled(CHAIN, [Reward("there", reward)], waits_for=reward.first)
    assert [len(prompts) for prompts in reward.prompts] == [3] * 4


def test_a_reward_in_this_process_is_called_after_the_model_has_sampled():
    both = Reporting(remote=False), Reporting(remote=True)
    for rewards in (both[:1], both):
        field_done = []
        field = Network()
        policy = FieldPolicy(field, (2,), SIGMAS)
        policy._decode = lambda x, done=field_done, policy=policy: (done.append(policy.evaluations), x)[1]
        roots = [Root(group, 0, Row(str(group), group)) for group in range(4)]
        named = [Reward(str(place), each) for place, each in enumerate(rewards)]
        rollout(policy, CHAIN, roots, rewards=named, micro_batch=1, seed=0, iteration=0)
        assert field_done == [16] * 4  # four groups of four steps each, all before the first decoding


def test_out_of_memory_of_a_reward_ends_the_rollout_with_the_same_message():
    messages = []
    for remote in (False, True):
        error = MemoryError("Unable to allocate 3.00 GiB")
        with pytest.raises(OutOfMemory) as raised:
            rolled(CHAIN, [Reward("judge", Reporting(remote, error))])
        messages.append(str(raised.value).partition(" asked for")[0])
    assert messages[0] == messages[1]
    assert "the reward 'judge' (3.00 GiB" in messages[0]


def test_a_run_with_a_remote_reward_is_the_run_with_a_local_one_also_after_a_resume(tmp_path):
    def begin(name, remote, **chosen):
        return trainer(settings(tmp_path / name, train__micro_batch=8, **chosen), reward=Reporting(remote))

    local, remote = begin("local", remote=False), begin("remote", remote=True)
    local.run(), remote.run()
    assert not differing(local, remote)
    assert lines(local) == lines(remote)
    begin("half", remote=True, train__iterations=3).run()
    assert not differing(remote, resumed(begin("half", remote=True), 3))
