"""Training on stored groups: no rollout, the numbers of a run that sampled them, exact resumes, and what is refused."""

from dataclasses import replace

import pytest
import shelf
import torch
from field import credit, differing, lines, resumed, settings, trainer, weights_of

from flowgrpo.errors import InputError
from flowgrpo.flow import trainer as trainers
from flowgrpo.flow.offline import stored_groups
from flowgrpo.flow.planning.iteration_forecast import predict_cost
from flowgrpo.training.distributed.assignment import assign_roots
from flowgrpo.training.distributed.data_shard import DataShard
from rewards import Reward

ISSUE = ["gdro", "dpo", "rwr", "awm"]
FEW = {"awm": {"draws": 3}, "dgpo": {"draws": 3}}
SIZES = {"train__group_size": 6, "train__groups": 2, "train__updates": 1, "train__iterations": 5}


def six(number):
    """The latents and the rewards of a group of six."""
    points = torch.randn(6, 2, generator=torch.Generator().manual_seed(number))
    return points, torch.exp(-points.square().sum(1)).tolist()


def store(folder, texts="abc"):
    groups = [(shelf.group(text, six(number)[1]), (six(number)[0],)) for number, text in enumerate(texts)]
    shelf.write(folder, groups)
    return folder


def offline_run(folder, preset="gdro", *, groups=None, texts=("a", "b", "c"), **overrides):
    """A run on stored groups, which evaluates nothing."""
    groups = groups or store(folder / "groups")
    algorithm = {"preset": preset, "likelihood": FEW.get(preset, {})}
    data = {"groups": str(groups), "rewards": {"closeness": 1.0}}
    chosen = settings(folder, **{"algorithm": algorithm, **SIZES, "data": data, **overrides})
    return trainer(chosen, texts=texts, held_out=0, reward=never, source=stored_groups.load_source(chosen))


def never(*args, **kwargs):
    pytest.fail("offline training asked for a reward")


@pytest.mark.parametrize("preset", [*ISSUE, "sft_best", "dgpo"])
def test_offline_training_never_calls_a_rollout(tmp_path, monkeypatch, preset):
    run = offline_run(tmp_path, preset)
    places = ((trainers, "rollout"), (trainers.draft_rollout, "run_draft"), (trainers, "score_leaves"))
    for place, name in places:
        monkeypatch.setattr(place, name, lambda *a, **k: pytest.fail("there was a rollout"))
    for name in ("decode", "generate"):
        monkeypatch.setattr(run.policy, name, lambda *a, **k: pytest.fail("something was decoded"))
    before = [p.clone() for p in run.weights.parameters]
    run.run()
    told = lines(run)
    assert len(told) == 5
    assert {(line["cost/rollout_evaluations"], line["cost/decoded"]) for line in told} == {(0, 0)}
    assert all(line["policy/updates"] == 1 for line in told)
    assert any(not torch.equal(a, b) for a, b in zip(before, run.weights.parameters, strict=True))


@pytest.mark.parametrize("preset", ["epg", "pepg", "elbo_grpo", "nft", "ram", "crd"])
def test_methods_of_an_old_policy_train_where_the_reference_stands_for_it(tmp_path, preset):
    likelihood = {"sampler": "reference", "anchor": "reference"}
    run = offline_run(tmp_path, preset, algorithm={"preset": preset, "likelihood": likelihood}, train__iterations=2)
    before = [p.clone() for p in run.weights.parameters]
    run.run()
    assert all(line["policy/updates"] == 1 for line in lines(run))
    assert any(not torch.equal(a, b) for a, b in zip(before, run.weights.parameters, strict=True))


def test_processes_take_their_parts_of_an_iteration(tmp_path):
    run = offline_run(tmp_path, "rwr", train__split="samples")
    groups, places = run.groups(3), {"iteration": 3, "device": torch.device("cpu")}
    whole = run.rollout(3, groups)
    deals = [assign_roots(run.config, groups, iteration=3, shard=DataShard(index, 2)) for index in range(2)]
    parts = [run.source.batch(groups, assignment, run.policy.sigmas, **places) for assignment in deals]
    assert [len(part.tree.leaves) for part in parts] == [6, 6]
    found = {}
    for batch in (whole, *parts):
        for leaf, x, value in zip(batch.tree.leaves, batch.tree.samples[0], batch.scores.values, strict=True):
            root = batch.tree.nodes[leaf].root
            found.setdefault((root.group, root.index), []).append((root.row, root.part, x.tolist(), value.tolist()))
    assert len(found) == 12
    assert all(first == second for first, second in found.values())


@pytest.mark.parametrize("preset", ISSUE)
def test_stored_samples_teach_what_they_taught_the_run_that_made_them(tmp_path, preset):
    """One iteration over all four prompts, and the same from its samples in a folder: the same weights, bit for bit."""
    algorithm, sizes = {"preset": preset, "likelihood": FEW.get(preset, {})}, {**SIZES, "train__groups": 4}
    texts = ("a", "bb", "ccc", "dddd")
    online = trainer(settings(tmp_path / "on", algorithm=algorithm, **sizes), texts=texts, held_out=0)
    batch = online.rollout(0, online.groups(0))
    groups = {}
    for number, prompt in enumerate(batch.groups.prompts):
        own = [i for i, leaf in enumerate(batch.tree.leaves) if batch.tree.nodes[leaf].root.group == number]
        rewards = batch.scores.values[own, 0].tolist()
        groups[prompt] = (shelf.group(texts[prompt], rewards), (batch.tree.samples[0][own],))
    assert batch.groups.prompts != sorted(batch.groups.prompts)
    shelf.write(tmp_path / "groups", [groups[prompt] for prompt in range(4)])
    run = offline_run(tmp_path, preset, groups=tmp_path / "groups", texts=texts, train__groups=4)
    online.iterate()
    run.iterate()
    after, kept = weights_of(online), weights_of(run)
    assert after.keys() == kept.keys()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in after.items())


@pytest.mark.parametrize("preset", ["gdro", *(pytest.param(name, marks=pytest.mark.zoo) for name in ISSUE[1:])])
def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path, preset):
    groups = store(tmp_path / "groups")
    whole = offline_run(tmp_path / "a", preset, groups=groups)
    whole.run()
    offline_run(tmp_path / "b", preset, groups=groups, train__iterations=2).run()
    rest = resumed(offline_run(tmp_path / "b", preset, groups=groups), 2)
    assert lines(whole) == lines(rest)
    assert not differing(whole, rest)


def test_an_epoch_takes_every_group_once_in_an_order_that_is_drawn(tmp_path):
    run = offline_run(tmp_path, groups=store(tmp_path / "groups", "abcdef"), texts=tuple("abcdef"))
    taken = [number for iteration in range(6) for number in run.groups(iteration).prompts]
    epochs = [taken[:6], taken[6:]]
    assert [sorted(epoch) for epoch in epochs] == [[0, 1, 2, 3, 4, 5]] * 2
    assert epochs[0] != epochs[1]
    for iteration in range(3):
        batch = run.rollout(iteration, run.groups(iteration))
        points = torch.cat([six(number)[0] for number in batch.groups.prompts])
        assert torch.equal(batch.tree.samples[0], points)
        assert batch.scores.values[:, 0].tolist() == [r for n in batch.groups.prompts for r in six(n)[1]]


def test_of_a_large_group_an_iteration_takes_some_and_later_others(tmp_path):
    sizes = {"train__group_size": 2, "train__groups": 1}
    run = offline_run(tmp_path, groups=store(tmp_path / "groups", "a"), texts=("a",), **sizes)

    def places_of(batch):
        return tuple(six(0)[0].tolist().index(point.tolist()) for point in batch.tree.samples[0])

    seen = []
    for iteration in range(12):
        batch = run.rollout(iteration, run.groups(iteration))
        places = places_of(batch)
        assert len(set(places)) == 2
        assert [six(0)[1][place] for place in places] == batch.scores.values[:, 0].tolist()
        assert tuple(batch.tree.nodes[leaf].root.row.seed for leaf in batch.tree.leaves) == places
        seen.append(places)
    assert {place for places in seen for place in places} == set(range(6))
    assert seen == [places_of(run.rollout(i, run.groups(i))) for i in range(12)]


def test_several_rewards_are_taken_by_name_and_weight(tmp_path):
    rewards = [[1.0, 10.0], [2.0, 20.0], [3.0, 5.0]]
    points = torch.arange(6.0).view(3, 2)
    shelf.write(tmp_path / "groups", [(shelf.group("a", rewards), (points,))], ("one", "two"))
    data = {"groups": str(tmp_path / "groups"), "rewards": {"two": 1.0, "one": -2.0}}
    sizes = {"train__group_size": 3, "train__groups": 1}
    run = offline_run(tmp_path, "dpo", groups=tmp_path / "groups", texts=("a",), data=data, **sizes)
    batch = run.rollout(0, run.groups(0))
    assert batch.scores.values.tolist() == [[10, 1], [20, 2], [5, 3]]
    noised = credit(run, batch).noised
    assert {draw.leaf for call in noised.calls for draw in call.draws} == {1, 2}  # 8, 16 and -1
    run.run()
    assert lines(run)[0]["reward/mean"] == pytest.approx((8 + 16 - 1) / 3)
    assert lines(run)[0]["reward/two/mean"] == pytest.approx(35 / 3)


def test_rewards_of_the_config_are_those_that_are_stored_by_their_names(tmp_path):
    chosen = settings(tmp_path, algorithm={"preset": "rwr"}, **SIZES, data={"groups": str(store(tmp_path / "groups"))})
    with pytest.raises(InputError, match=r"^rewards: the stored groups have no reward 'shapes'"):
        stored_groups.load_source(chosen)
    chosen.rewards[0] = chosen.rewards[0].model_copy(update={"name": "closeness", "weight": 3.0})
    source = stored_groups.load_source(chosen)
    assert (source.names, source.combination.weights.tolist()) == (["closeness"], [3.0])


def test_a_sample_whose_reward_was_lost_has_no_part(tmp_path):
    nan = float("nan")
    groups = [(shelf.group("a", [1.0, nan, 2.0, 4.0], lost=[1]), (torch.randn(4, 2),))]
    shelf.write(tmp_path / "groups", groups)
    sizes = {"train__group_size": 4, "train__groups": 1}
    run = offline_run(tmp_path, groups=tmp_path / "groups", texts=("a",), **sizes)
    noised = credit(run, run.rollout(0, run.groups(0))).noised
    assert {draw.leaf for call in noised.calls for draw in call.draws} == {0, 2, 3}
    assert run.iterate()["reward/lost"] == 1


def test_rewards_are_still_asked_at_evaluations(tmp_path):
    data = {"groups": str(store(tmp_path / "groups")), "rewards": {"closeness": 2.0}}
    chosen = settings(tmp_path, algorithm={"preset": "rwr"}, **SIZES, data=data)
    watched = Reward("watched", lambda samples, prompts: samples[:, 0])
    run = trainer(
        chosen, texts=("a", "b", "c"), held_out=2, source=stored_groups.load_source(chosen), rewards=[watched]
    )
    run.run()
    assert {"reward/closeness/mean"} <= lines(run)[0].keys()
    held_out = lines(run, "eval")[-1]
    assert held_out["reward/mean"] == pytest.approx(held_out["reward/watched/mean"])
    assert "reward/closeness/mean" not in held_out


def test_the_plan_counts_no_rollout_and_no_decoding(tmp_path):
    run = offline_run(tmp_path)
    told = predict_cost(run.config, 6)
    assert (told.rollout, told.decoded) == (0, 0)
    online = settings(tmp_path, algorithm={"preset": "gdro"}, **SIZES)
    assert predict_cost(online, 6) == replace(told, rollout=2 * 6 * 6, decoded=2 * 6)
    assert run.iterate()["cost/model_evaluations"] == told.update


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            {"algorithm": {"preset": "flow_grpo"}},
            r"algorithm\.likelihood: trajectory needs the steps of rollouts, but data.groups has only final samples",
        ),
        (
            {"algorithm": {"preset": "nft"}},
            r"algorithm\.likelihood\.sampler: old follows the live policy, which did not sample data.groups; take",
        ),
        (
            {"algorithm": {"preset": "nft", "likelihood": {"sampler": "reference"}}},
            r"algorithm\.likelihood\.anchor: old follows .*; take algorithm\.likelihood\.anchor=reference or live",
        ),
        ({"train__draft": {"pool": 2}}, r"train\.draft: it chooses the starts of rollouts"),
        ({"prompts__pick__budget": "root_variance"}, r"prompts\.pick\.budget: data\.groups has groups of one size"),
        (
            {"data": {"rewards": {"one": 1.0}}},
            r"data\.rewards: it names rewards of data\.groups, but data\.groups "
            r"is not set",
        ),
    ],
)
def test_what_stored_groups_cannot_do_is_one_sentence(tmp_path, overrides, said):
    with pytest.raises(InputError, match=said):
        settings(tmp_path, **{"algorithm": {"preset": "gdro"}, "data": {"groups": "nowhere"}, **overrides})


def test_groups_that_are_too_small_are_refused(tmp_path):
    chosen = settings(tmp_path, algorithm={"preset": "rwr"}, data={"groups": str(store(tmp_path / "groups"))})
    with pytest.raises(
        InputError, match=r"train\.group_size: 8 is more than the 6 samples of a group in .*; take that or less"
    ):
        stored_groups.load_source(chosen)
