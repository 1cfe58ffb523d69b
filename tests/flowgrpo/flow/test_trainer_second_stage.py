"""Flow runs whose hard groups get further samples after their first rewards."""

from dataclasses import replace

import ahead
import pytest
import torch
from field import MANY_DRAWS, TARGET, differing, lines, resumed, settings, trainer, weights_of
from pair import pair

from flowgrpo.flow.planning.iteration_forecast import most_further, predict_cost
from flowgrpo.training.reports.tree_store import TreeFolder

STAGED = {"prompts__pick": {"second_stage": "equal"}, "train__iterations": 1, "train__replay": "always"}


def rare(samples, prompts):
    """Reward 0 or 1, so that some groups have no success among the first samples."""
    return (((samples - TARGET) ** 2).sum(1) < 1.2).double()


def staged(folder, **overrides):
    return trainer(settings(folder, **STAGED | overrides), reward=rare, held_out=0)


def run_and_watch(run):
    """Run one iteration and return its groups."""
    seen, real = [], run.state.second_stage
    run.state.second_stage = lambda *told: seen.append(real(*told)) or seen[-1]
    run.run()
    (groups,) = seen
    return groups


METHODS = {
    "flow_grpo": {},
    "flow_grpo in shuffled samples": {"train__split": "samples", "train__updates": 1},
    "flow_grpo of units of the best": {"train__select": {"fraction": 0.5}},
    "flow_grpo_fast": {},
    "mix_grpo": {},
    "tempflow": {"train__group_size": 24},
    "branch_grpo": {"train__updates": 1},
    "dense_grpo": {},
    "ctpo": {},
    "nft": {},
    "dpo": {},
    "crd": {},
    "awm_split": {},
    "adaptive": {"train__group_size": 12},
}


@pytest.mark.parametrize("method", METHODS)
def test_two_stages_train_as_one_rollout_of_all_samples_does(tmp_path, method):
    """Trees that grow later are as those that grow at once, up to the cut into calls."""
    preset = method.partition(" ")[0]
    few = {"likelihood": {"draws": 2}} if preset in MANY_DRAWS else {}
    chosen = {"algorithm": {"preset": preset, **few}, **METHODS[method]}
    run = staged(tmp_path / "staged", **chosen)
    groups = run_and_watch(run)
    assert sum(groups.roots) > sum(groups.first)
    whole = staged(tmp_path / "whole", prompts__pick={}, **chosen)
    real = whole.state.groups
    whole.state.groups = lambda iteration: replace(groups, first=None) if iteration == 0 else real(iteration)
    whole.run()
    (line,), (expected,) = lines(run), lines(whole)
    others = weights_of(whole)
    for name, tensor in weights_of(run).items():
        torch.testing.assert_close(tensor, others[name], rtol=1e-4, atol=2e-6)
    for key in ("policy/grad_norm", "groups/teaching", "groups/zero_std_fraction", "groups/left_out_fraction"):
        assert line[key] == pytest.approx(expected[key], rel=1e-4)
    for key in ("cost/model_evaluations", "cost/trained_edges", "cost/decoded"):
        assert line[key] == expected[key]


def test_the_statistics_are_of_the_first_samples_and_the_counts_of_all(tmp_path):
    run = staged(tmp_path, train__updates=1)
    made = run.made(0)
    groups, batch = made.batch.groups, made.batch
    plain = staged(tmp_path / "plain", prompts__pick={}, train__updates=1)
    first = plain.made(0)
    further = sum(groups.roots) - 32
    assert further > 8
    assert batch.counts["prompts/second_stage"] == further
    assert batch.decoded == 32 + further
    assert made.evaluations == first.evaluations * (32 + further) // 32
    values, members = batch.outcomes
    assert members == first.batch.outcomes[1]
    assert values.tolist() == first.batch.outcomes[0].tolist()
    run.run()
    (line,) = lines(run)
    assert line["prompts/second_stage"] == further
    assert line["reward/mean"] == pytest.approx(float(values.mean()))
    assert sum(count for count, *_ in run.prompt_stats.seen.values()) == 32


def test_groups_that_succeed_get_no_further_samples(tmp_path):
    run = staged(tmp_path, prompts__pick={"second_stage": "equal", "worst": -2.0}, train__iterations=2)
    run.run()
    assert [line["prompts/second_stage"] for line in lines(run)] == [0, 0]
    assert [line["cost/decoded"] for line in lines(run)] == [32, 32]


def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path):
    chosen = {"train__iterations": 4, "run__staleness": 1, "train__learning_rate": 0.005}
    whole = staged(tmp_path / "whole", **chosen)
    whole.run()
    half = staged(tmp_path / "half", **{**chosen, "train__iterations": 2})
    half.run()
    rest = resumed(staged(tmp_path / "half", **chosen), 2)
    assert not differing(whole, rest)
    assert lines(whole) == lines(rest)
    assert all(line["prompts/second_stage"] > 0 for line in lines(whole)[2:])


def test_processes_train_as_one_does(tmp_path):
    """The third iteration has one further sample, so that one of two processes has none, and the fourth has none."""
    expected, others = ahead.staged(tmp_path / "alone")
    assert [line["prompts/second_stage"] for line in expected] == [24, 3, 1, 0]
    for found, weights in pair(ahead.staging, tmp_path):
        for line, one in zip(found, expected, strict=True):
            for key in ("reward/mean", "policy/grad_norm", "prompts/second_stage", "cost/decoded", "groups/teaching"):
                assert line[key] == pytest.approx(one[key], rel=1e-3)
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, others[name], rtol=1e-4, atol=1e-5)


def test_processes_of_a_shard_have_the_same_further_samples(tmp_path):
    (first, one), (second, other) = pair(ahead.staging_together, tmp_path)
    assert first == second
    assert (first[0]["prompts/second_stage"], first[0]["cost/decoded"]) == (24, 40)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_kept_trees_hold_the_samples_of_both_stages(tmp_path):
    run = staged(tmp_path, run__trees={"prompts": 4}, train__updates=1)
    groups = run_and_watch(run)
    kept = TreeFolder(run.folder).read()
    assert [tree.group for tree in kept] == [0, 1, 2, 3]
    for tree, roots in zip(kept, groups.roots, strict=True):
        starts = [node for node in tree.nodes if node.parent is None]
        assert (len(starts), len({node.seed for node in starts})) == (roots, roots)
        assert sum(not node.estimated for node in tree.nodes) == roots
        steps = [node.log_prob for node in tree.nodes if node.trained]
        assert len({*steps}) == len(steps) > roots  # no step is shown as another's
        for node in tree.nodes:
            assert node.parent is None or tree.nodes[node.parent].step == node.step - 1


@pytest.mark.parametrize("preset", ["flow_grpo", "tempflow", "nft"])
def test_the_plan_has_the_most_that_it_costs(tmp_path, preset):
    """Four times the samples in all, where none of them earns anything."""
    chosen = {"algorithm": {"preset": preset}, "run__patience": None, "train__group_size": 24}
    config = settings(tmp_path, **STAGED | chosen)
    run = trainer(config, reward=lambda samples, prompts: torch.zeros(len(samples)), held_out=0)
    run.run()
    (line,) = lines(run)
    first, (rollout, update, decoded) = predict_cost(config, 6), most_further(config, 6)
    assert decoded == 3 * first.decoded == line["cost/decoded"] - first.decoded
    assert line["cost/rollout_evaluations"] == first.rollout + rollout
    assert line["cost/update_evaluations"] == first.update + update
    assert most_further(settings(tmp_path, **chosen), 6) == (0, 0, 0)
