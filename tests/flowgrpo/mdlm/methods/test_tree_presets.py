"""Presets of text trees against their papers' numbers, which are counted here answer by answer."""

import math

import pytest
import torch

from flowgrpo.mdlm.config import TextConfig
from flowgrpo.mdlm.decoding.decode import Rollout
from flowgrpo.mdlm.methods.credit import Earned
from flowgrpo.mdlm.methods.tree_presets import PRESETS
from flowgrpo.mdlm.methods.trees import grow

# Two groups of two trees; a tree has one branch, which splits into two, of which each splits into two.
SHARED = (8, 4, 2, 1)  # answers of a group that share the prompt, and a branch of each depth
REWARDS = ([0.2, 1.0, -0.6, 0.7, 0.1, 0.4, 2.0, -1.0], [0.0, 0.3, 0.9, 0.5, -0.2, -0.7, 1.5, 0.6])
STEPS = [2, 0, 3, 1]  # tokens are committed in another order than they stand in
DEPTHS = [3, 1, 3, 2]  # of the branch that commits each: splits lie before the steps 1 and 2


def advantages(name, rewards=REWARDS):
    """Return the advantages (group, answer, token) of a preset by the code of a run."""
    algorithm = TextConfig.model_validate({"model": {"path": "digits"}, "algorithm": {"preset": name}}).algorithm
    size = len(rewards[0])
    count = size * len(rewards)
    rollout = Rollout(
        ids=torch.zeros(count, 5, dtype=torch.long),
        attention_mask=torch.ones(count, 5, dtype=torch.bool),
        step_map=torch.tensor([STEPS] * count),
        commit_logp=torch.zeros(count, 4, dtype=torch.float64),
        nfe=torch.full((count,), 4),
        steps=torch.full((count,), 4),
        branched=torch.tensor([[1, 2]] * count),
        drafts=torch.zeros(count, 0, 4, dtype=torch.int32),
    )
    branches = grow([(group, index) for group in range(len(rewards)) for index in range(size)], 2, 2)
    values = torch.tensor([each for group in rewards for each in group], dtype=torch.float64)[:, None]
    earned = Earned(branches=branches, rollout=rollout, rewards=values, drafts=None)
    units = algorithm.credit.units(earned)
    found = algorithm.baseline.advantages(units.values, torch.ones(1).double(), units.comparison, nested=units.nested)
    return found[algorithm.credit.of_tokens(units, earned)].reshape(len(rewards), size, 4).tolist()


def mean(values):
    values = [*values]
    return sum(values) / len(values)


def spread(values):
    values = [*values]
    return math.sqrt(mean((each - mean(values)) ** 2 for each in values))


def sharing(answer, depth):
    """The answers that share the branch of a depth with an answer; at depth 0 the group."""
    return range(answer - answer % SHARED[depth], answer - answer % SHARED[depth] + SHARED[depth])


def value(rewards, answer, depth):
    return mean(rewards[each] for each in sharing(answer, depth))


def branch_spread(rewards):
    """The standard deviation of all branches, the departure of tempo, hgpo and salt, and what is added to it."""
    firsts = [(answer, depth) for depth in (1, 2, 3) for answer in range(0, 8, SHARED[depth])]
    return spread(value(rewards, *each) for each in firsts) + 1e-4


def tempo(rewards, answer, depth):
    """(r - mean) + V(child) - V(parent), over a standard deviation; mean over the answers of the branch."""
    gain = value(rewards, answer, depth) - value(rewards, answer, depth - 1)
    return mean(rewards[each] - mean(rewards) + gain for each in sharing(answer, depth)) / branch_spread(rewards)


def gigpo(rewards, answer, depth):
    """The advantage of the episode plus that among those from the same state; mean over the answers of the branch."""
    state = value(rewards, answer, depth) - value(rewards, answer, depth - 1)
    return mean(rewards[each] - mean(rewards) + state for each in sharing(answer, depth))


def spo_tree(rewards, answer, depth):
    """V(child) - V(parent), where V is the mean of its children's."""

    def of_children(answer, depth):
        if depth == 3:
            return rewards[answer]
        return mean(of_children(child, depth + 1) for child in sharing(answer, depth) if child % SHARED[depth + 1] == 0)

    return of_children(answer - answer % SHARED[depth], depth) - of_children(
        answer - answer % SHARED[depth - 1], depth - 1
    )


def tree_po(rewards, answer, depth):
    """The mean over the prompt and the branches above of r - V, whitened over all branches of the batch."""

    def levels(rewards, answer, depth):
        return mean(value(rewards, answer, depth) - value(rewards, answer, above) for above in range(depth))

    every = [
        levels(group, answer, depth)
        for group in REWARDS
        for depth in (1, 2, 3)
        for answer in range(0, 8, SHARED[depth])
    ]
    return (levels(rewards, answer, depth) - mean(every)) / (spread(every) + 1e-4)


def hgpo(rewards, answer, depth):
    """Sum of (k + 1) (V - mean of those who share k branches) over sum of (k + 1)."""
    gaps = [value(rewards, answer, depth) - value(rewards, answer, above) for above in range(depth)]
    weights = range(1, depth + 1)
    return sum(w * gap for w, gap in zip(weights, gaps, strict=True)) / sum(weights) / branch_spread(rewards)


def salt(rewards, answer, depth):
    """The mean over the answers that share a step of (r - mean) / std."""
    return mean((rewards[each] - mean(rewards)) / branch_spread(rewards) for each in sharing(answer, depth))


def d_tree_rpo(rewards, answer, depth):
    """V(child) less the mean of its other siblings."""
    siblings = {each - each % SHARED[depth] for each in sharing(answer, depth - 1)}
    others = siblings - {answer - answer % SHARED[depth]}
    return value(rewards, answer, depth) - mean(value(rewards, other, depth) for other in others)


RULES = {each.__name__: each for each in (tempo, spo_tree, tree_po, gigpo, hgpo, salt, d_tree_rpo)}


@pytest.mark.parametrize("name", PRESETS)
def test_a_token_has_the_advantage_of_the_paper(name):
    found = advantages(name)
    for group, rewards in enumerate(REWARDS):
        for answer in range(8):
            expected = [RULES[name](rewards, answer, depth) for depth in DEPTHS]
            assert found[group][answer] == pytest.approx(expected, abs=1e-9)


def test_a_group_of_one_tree_has_no_level_twice():
    """Its prompt and its tree hold the same answers, so that a last branch has two levels of weights 1 and 2."""
    rewards = REWARDS[0][:4]
    (found,) = advantages("hgpo", [rewards])
    pairs = [mean(rewards[:2]), mean(rewards[2:])]
    std = spread([mean(rewards), *pairs, *rewards]) + 1e-4
    for answer, tokens in enumerate(found):
        gaps = rewards[answer] - mean(rewards), rewards[answer] - pairs[answer // 2]
        expected = {1: 0.0, 2: (pairs[answer // 2] - mean(rewards)) / std, 3: (gaps[0] + 2 * gaps[1]) / 3 / std}
        assert tokens == pytest.approx([expected[depth] for depth in DEPTHS])


def test_where_no_other_sibling_is_known_the_episode_counts_twice():
    rewards = [REWARDS[0][0], math.nan, *REWARDS[0][2:]]
    (found,) = advantages("gigpo", [rewards])
    known = mean(each for each in rewards if not math.isnan(each))
    assert found[0][DEPTHS.index(3)] == pytest.approx(2 * (rewards[0] - known))
