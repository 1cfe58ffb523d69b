"""A snapshot's samples beside stored ones: whose place they take, what they are, and what that costs."""

import pytest
import shelf
import torch
from field import credit, differing, lines, resumed, settings, trainer

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.offline import bank_samples, stored_groups
from flowgrpo.flow.planning.iteration_forecast import predict_cost
from flowgrpo.training.weights.old_policies import Bank
from samplers import noise

BANK = {"every": 1, "keep": 3}
TEXTS = ("a", "bb", "ccc")
REWARDS = ([0.1, 0.9, 0.5], [3.0, 1.0, 2.0], [0.4, 0.4, 0.4])  # of the last group nothing is learned


def points(number):
    return 2 * torch.randn(3, 2, generator=torch.Generator().manual_seed(number))


def run_of(folder, preset="seppo", **overrides):
    """A run on three stored groups of three, which evaluates nothing."""
    if not (folder / "groups").exists():
        groups = [shelf.group(text, rewards) for text, rewards in zip(TEXTS, REWARDS, strict=True)]
        shelf.write(folder / "groups", [(group, (points(i),)) for i, group in enumerate(groups)])
    written = {"algorithm": {"preset": preset, "likelihood": {"sampler": "bank", "anchor": "bank", "bank": BANK}}}
    written["algorithm"]["objective"] = {"kl": {"reference": "fixed"}}
    written |= {"data": {"groups": str(folder / "groups"), "rewards": {"closeness": 1.0}}}
    sizes = {"train__group_size": 3, "train__groups": 3, "train__updates": 1, "train__iterations": 5}
    chosen = settings(folder, **{**written, **sizes, **overrides})
    return trainer(chosen, texts=TEXTS, held_out=0, source=stored_groups.load_source(chosen))


def test_the_worse_one_of_a_stored_pair_is_sampled_by_the_drawn_snapshot(tmp_path):
    run, stood, drawn = run_of(tmp_path), [], set()
    for iteration in range(5):
        stood.append([p.detach().clone() for p in run.weights.parameters])
        batch = run.rollout(iteration, run.groups(iteration))
        made = credit(run, batch).noised.tree.samples[0]
        number = Bank(**BANK).draw(iteration, run.config.run.seed, "bank", iteration)
        drawn.add(number)
        replaced = []
        for group, prompt in enumerate(batch.groups.prompts):
            worst = {0: 0, 1: 1, 2: None}[prompt]
            for index in range(3):
                (leaf,) = [i for i, n in enumerate(batch.tree.leaves) if place(batch.tree, n) == (group, index)]
                if index == worst:
                    seed = noise.seed(run.config.run.seed, "start", iteration, group, index)
                    with torch.no_grad(), run.weights.swap([p.clone() for p in stood[number]]):
                        expected = run.policy.generate([Row(TEXTS[prompt], seed, {})])[0]
                    torch.testing.assert_close(made[leaf], expected)
                    replaced.append(leaf)
                else:
                    assert torch.equal(made[leaf], points(prompt)[index])
        assert len(replaced) == 2
        assert torch.equal(batch.tree.samples[0], torch.cat([points(prompt) for prompt in batch.groups.prompts]))
        run.iterate()
        run.done = iteration + 1
    assert len(drawn) > 2


def test_a_sample_is_the_same_whoever_makes_it_and_beside_whichever_others(tmp_path):
    run = run_of(tmp_path, train__micro_batch=1)
    batch = run.rollout(0, run.groups(0))
    leaves = [0, 4, 8]
    rows = [run._row_at(0, batch.groups, *place(batch.tree, batch.tree.leaves[leaf])) for leaf in leaves]
    several = bank_samples.resample(run.config, run.policy, batch.tree, leaves, rows=rows, iteration=0).samples[0]
    assert torch.equal(several[[1, 2, 3, 5, 6, 7]], batch.tree.samples[0][[1, 2, 3, 5, 6, 7]])
    assert not torch.isclose(several[leaves], batch.tree.samples[0][leaves]).any()
    for leaf, row in zip(leaves, rows, strict=True):
        alone = bank_samples.resample(run.config, run.policy, batch.tree, [leaf], rows=[row], iteration=0).samples[0]
        assert torch.equal(alone[leaf], several[leaf])


def place(tree, node):
    return tree.nodes[node].root.group, tree.nodes[node].root.index


@pytest.mark.parametrize("preset", ["seppo", pytest.param("dpo", marks=pytest.mark.zoo)])
def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path, preset):
    whole = run_of(tmp_path / "a", preset)
    whole.run()
    run_of(tmp_path / "b", preset, train__iterations=2).run()
    rest = resumed(run_of(tmp_path / "b", preset), 2)
    assert lines(whole) == lines(rest)
    assert not differing(whole, rest)
    assert {line["policy/updates"] for line in lines(rest)} == {1}


def test_its_samples_are_counted_with_the_update_as_planned(tmp_path):
    """Two pairs, for the made-up rewards of a plan three: a chain of six steps each; scored thrice at four noise levels."""
    run = run_of(tmp_path)
    assert (predict_cost(run.config, 6).rollout, predict_cost(run.config, 6).decoded) == (0, 0)
    assert predict_cost(run.config, 6).update == 3 * (6 + 3 * 2 * 4)
    line = run.iterate()
    assert (line["cost/rollout_evaluations"], line["cost/decoded"]) == (0, 0)
    assert line["cost/update_evaluations"] == 2 * (6 + 3 * 2 * 4)


def test_a_snapshot_s_sample_that_is_not_finite_leaves_the_update(tmp_path):
    run = run_of(tmp_path, train__iterations=1)
    batch = run.rollout(0, run.groups(0))
    with torch.no_grad():
        for own in run.weights.snapshots.kept[0]:
            own.fill_(torch.nan)
    noised = credit(run, batch).noised
    left = {place(batch.tree, batch.tree.leaves[draw.leaf]) for call in noised.calls for draw in call.draws}
    assert {(batch.groups.prompts[group], index) for group, index in left} == {(0, 1), (1, 0)}


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (
            {"preset": "gdro", "likelihood": {"sampler": "bank", "anchor": "bank"}},
            r"algorithm\.likelihood\.sampler: .* a snapshot makes the worse sample of a pair, but plackett_luce has none",
        ),
        (
            {"preset": "seppo", "likelihood": {"sampler": "reference"}},
            r"algorithm\.likelihood\.anchor: bank holds snapshots of the live policy, which did not sample data\.groups",
        ),
    ],
)
def test_what_a_snapshot_cannot_do_beside_stored_groups_is_one_sentence(tmp_path, algorithm, said):
    with pytest.raises(InputError, match=said):
        settings(tmp_path, algorithm=algorithm, data={"groups": "nowhere"})
