"""Credit of the branches of text trees."""

import pytest
import torch

from flowgrpo.mdlm.decoding.decode import Rollout
from flowgrpo.mdlm.methods.credit import Depthwise, Earned, Nested, Siblings, StepGain, Terminal
from flowgrpo.mdlm.methods.trees import grow
from flowgrpo.training.advantages.baseline import GroupMean, LeaveOneOut

MEMBERS = [(3, index) for index in range(8)]  # two trees of four leaves
STEPS = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 1, 3], [0, 3, 1, 2], *[[3, 0, 2, 1]] * 4])
BRANCHED = torch.tensor([[1, 2]] * 8)
REWARDS = torch.tensor([0.2, 1.0, -0.6, 0.7, 0.1, 0.4, 2.0, -1.0], dtype=torch.float64)[:, None]


def rollout(steps=STEPS, branched=BRANCHED):
    count, length = steps.shape
    logp = torch.arange(4.0, dtype=torch.float64).expand(count, -1).clone()
    return Rollout(
        ids=torch.zeros(count, 1 + length, dtype=torch.long),
        attention_mask=torch.ones(count, 1 + length, dtype=torch.bool),
        step_map=steps,
        commit_logp=logp,
        nfe=torch.full((count,), 4),
        steps=torch.full((count,), 4),
        branched=branched,
        drafts=torch.zeros(count, 0, length, dtype=torch.int32),
    )


BRANCHES = grow(MEMBERS, 2, 2)


def earned(made=None, drafts=None):
    made = rollout() if made is None else made
    return Earned(branches=BRANCHES, rollout=made, rewards=REWARDS, drafts=drafts)


def token_advantages(credit, baseline):
    units = credit.units(earned())
    found = baseline.advantages(units.values, torch.ones(1).double(), units.comparison, nested=units.nested)
    return found[credit.of_tokens(units, earned())]


def test_every_token_belongs_to_the_branch_of_its_step():
    level = BRANCHES.level(rollout())
    assert level[0].tolist() == [0, 1, 2, 2]
    assert level[3].tolist() == [0, 2, 1, 2]
    edges = BRANCHES.edge.gather(1, level)
    assert edges[0, 0] == edges[3, 0] != edges[4, 1]
    assert edges[0, 1] == edges[1, 1] != edges[2, 2]
    assert len({int(edges[leaf][level[leaf] == 2][0]) for leaf in range(8)}) == 8


def test_siblings_compare_with_the_branches_that_leave_one_canvas():
    """SPO-tree: V(child) less the mean of all siblings'; d-TreeRPO: of the other siblings'."""
    found = token_advantages(Siblings(), GroupMean(std="none"))
    first = [float(REWARDS[:4].mean()), float(REWARDS[4:].mean())]
    assert found[0, 0] == pytest.approx(first[0] - sum(first) / 2)
    assert found[0, 1] == pytest.approx(0.6 - first[0])
    assert found[0, 2] == found[0, 3] == pytest.approx(0.2 - 0.6)
    others = token_advantages(Siblings(), LeaveOneOut())
    torch.testing.assert_close(others, 2 * found)  # of two siblings


def test_siblings_weigh_as_their_answers_or_alike():
    answers = torch.tensor([4.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0] * 2).double()
    alike = Siblings(weights="branches").units(earned()).weight.sort().values
    assert (Siblings().units(earned()).weight == 1).all()  # a branch's tokens are those of each of its answers
    torch.testing.assert_close(alike, (answers.mean() / answers).sort().values)


def test_terminal_gives_every_token_the_reward_of_its_answer():
    found = token_advantages(Terminal(), GroupMean(std="none"))
    torch.testing.assert_close(found, (REWARDS - REWARDS.mean())[:, 0])


def test_path_weights_prefer_the_likelier_rest():
    made = rollout()
    made.commit_logp[0] += 5  # the first answer's rest is the likelier
    units = Depthwise(weights="path").units(earned(made))
    below = int(units.of_edge[BRANCHES.edge[0, 1]])
    assert units.values[below, 0] == pytest.approx(0.2, abs=1e-2)
    assert Depthwise().units(earned(made)).values[below, 0] == pytest.approx(0.6)


def test_the_log_probability_of_a_branch_is_that_of_its_tokens():
    total = BRANCHES.log_prob(rollout())
    assert total[BRANCHES.edge[0]].tolist() == [0.0, 1.0, 5.0]
    assert total[BRANCHES.edge[3]].tolist() == [0.0, 2.0, 4.0]


def test_nested_compares_first_branches_over_all_trees_of_the_group():
    found = token_advantages(Nested(group=0.0, siblings=1.0), LeaveOneOut())
    assert found[0, 0] == pytest.approx(float(REWARDS[:4].mean() - REWARDS[4:].mean()))


def test_chains_are_trees_of_one_branch():
    chains = grow([(0, 0), (0, 1), (1, 0)], 1, 0)
    made = rollout(STEPS[:3], BRANCHED[:3, :0])
    assert chains.edge.shape == (3, 1)
    assert (chains.level(made) == 0).all()
    units = Terminal().units(Earned(branches=chains, rollout=made, rewards=REWARDS[:3], drafts=None))
    assert units.comparison.tolist() == [[0], [0], [1]]
    assert units.root.tolist() == [0, 1, 0]


def test_a_step_has_what_the_prediction_gained_and_what_later_ones_earn():
    chains = grow([(0, 0), (0, 1)], 1, 0)
    made = rollout(torch.tensor([[0, 1, 2, 3], [1, 0, 3, 3]]), BRANCHED[:2, :0])
    made.steps[1] = 3  # its last two tokens lie behind a stop
    drafts = torch.tensor([[0.1, 0.4, 0.2, 0.6], [0.0, 0.5, 0.5, torch.nan]], dtype=torch.float64)[:, :, None]
    given = Earned(branches=chains, rollout=made, rewards=torch.tensor([[0.8], [1.0]]).double(), drafts=drafts)
    units = StepGain().units(given)
    assert units.comparison.tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [0, 0], [0, 1], [0, 2]]
    # The released code's R_t - R_(t-1) + mean(R_(t+1) ...), with R_t the reward of the prediction after step t.
    first = [0.3 + (0.2 + 0.6 + 0.8) / 3, -0.2 + (0.6 + 0.8) / 2, 0.4 + 0.8, 0.2 + 0.8]
    assert units.values[:, 0].tolist() == pytest.approx([*first, 0.5 + (0.5 + 1.0) / 2, 0.0 + 1.0, 0.5 + 1.0])
    assert StepGain().of_tokens(units, given).tolist() == [[0, 1, 2, 3], [5, 4, 6, 6]]


def test_a_prediction_without_a_reward_leaves_only_the_steps_beside_it_without_credit():
    chains, made = grow([(0, 0)], 1, 0), rollout(STEPS[:1], BRANCHED[:1, :0])
    drafts = torch.tensor([[0.1, torch.nan, 0.2, 0.6]], dtype=torch.float64)[:, :, None]
    given = Earned(branches=chains, rollout=made, rewards=torch.tensor([[0.8]]).double(), drafts=drafts)
    values = StepGain().units(given).values[:, 0]
    assert values.isfinite().tolist() == [False, False, True, True]
    assert values[2:].tolist() == pytest.approx([0.4 + 0.8, 0.2 + 0.8])
