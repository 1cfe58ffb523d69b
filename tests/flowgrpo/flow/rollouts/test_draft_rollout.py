"""Drafts: which starts they choose, that a chosen start is sampled as if there had been no draft, and what is told of it."""

import json
import math
import shutil

import pytest
import torch
from cases import cases
from cut_back import cut_back
from field import closeness, differing, lines, resumed, settings, trainer
from low_layers import put_layers
from pictures import pictures
from runs import metrics

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.planning.plan import forwards, plan
from flowgrpo.flow.rollouts.draft_rollout import DraftScore, agreement, halves_kept, spearman
from flowgrpo.flow.rollouts.rollout import walk
from rewards import Reward
from samplers import noise
from samplers.trees import Root

DRAFT = {"train__draft": {"pool": 3, "call": {}}}
BY_EULER = {"preset": "nft", "kernel": {"name": "ode", "solver": "euler"}}
FOLLOWING = {"old": {"flat": 0, "slope": 0.5, "most": 0.5}}
BRIEF = ["train.micro_batch=8", "eval={every: 9, prompts: 1, save: 0}"]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3, 4, 5], [5, 6, 7, 8, 7], 8 / math.sqrt(10 * 9.5)),  # ranks of b: 1, 2, 3.5, 5, 3.5
        ([1, 2, 3], [1, 8, 900], 1.0),
        ([1, 2, 3], [3, 2, 1], -1.0),
        ([1, 2, 3, 4], [2, 1, 4, 3], 0.6),  # 1 - 6 * 4 / (4 * 15)
        ([1, 1, 1], [1, 2, 3], math.nan),
        ([1], [2], math.nan),
        ([], [], math.nan),
    ],
)
def test_the_correlation_of_ranks(a, b, expected):
    assert spearman(*(torch.tensor(x).double() for x in (a, b))) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([4, 3, 2, 1], [9, 8, 1, 0], 1.0),
        ([4, 3, 2, 1], [0, 1, 8, 9], 0.0),
        ([4, 3, 2, 1], [9, 1, 8, 0], 0.5),
        ([3, 2, 1], [3, 1, 2], 1 / 3),  # the better half of three is two
        ([4, 3, 2, 1], [5, 5, 5, 5], 0.5),
        ([4, 3, 2, 1], [9, 5, 5, 0], 0.75),  # of the two equal ones either, by chance
        ([1], [1], math.nan),
    ],
)
def test_the_share_of_halves_that_stay(a, b, expected):
    assert halves_kept(*(torch.tensor(x).double() for x in (a, b))) == pytest.approx(expected, nan_ok=True)


def test_groups_are_ranked_by_themselves_and_the_lost_left_out():
    roots = [
        *(DraftScore(0, draft, final) for draft, final in ((1, 11), (2, 12), (3, 13), (math.nan, 0), (9, math.nan))),
        *(DraftScore(1, draft, final) for draft, final in ((101, 3), (102, 2), (103, 2.5))),
        *(DraftScore(2, 1, final) for final in (1, 2)),  # the draft tells nothing: no correlation
    ]
    told = agreement(roots)
    assert told["draft/rank_agreement"] == pytest.approx((1 - 0.5) / 2)
    assert told["draft/halves_kept"] == pytest.approx((1 + 1 / 3 + 0.5) / 3)
    assert agreement([DraftScore(0, math.nan, 1.0)]) == {"draft/rank_agreement": None, "draft/halves_kept": None}


@pytest.mark.parametrize(
    "algorithm",
    [BY_EULER, {"preset": "tempflow", "tree": {"branches": 2}}, {"preset": "branch_grpo", "tree": {"splits": [0, 2]}}],
)
def test_a_draft_composes_with_any_row_and_tells_how_it_ranked(tmp_path, algorithm):
    run = trainer(settings(tmp_path, algorithm=algorithm, train__iterations=2, **DRAFT), held_out=0)
    run.run()
    for line in lines(run):
        assert line["policy/grad_norm"] > 0
        if algorithm["preset"] == "nft":  # the draft is what the rollout is
            assert (line["draft/rank_agreement"], line["draft/halves_kept"]) == (pytest.approx(1), 1)
        else:
            assert -1 <= line["draft/rank_agreement"] <= 1
            assert 0 <= line["draft/halves_kept"] <= 1


def test_a_broken_draft_ranks_nothing_and_the_run_goes_on(tmp_path):
    """The samples of a draft are equal: no order, no correlation, and halves as chance has them."""
    calls = []

    def blind(samples, prompts):
        calls.append(len(samples))
        return torch.zeros(len(samples)) if len(calls) == 1 else closeness(samples, prompts)

    chosen = settings(tmp_path, train__iterations=1, train__groups=1, train__updates=1, **DRAFT)
    run = trainer(chosen, held_out=0, rewards=[Reward("blind", blind, group_wise=True)])
    run.run()
    (line,) = lines(run)
    assert (line["draft/rank_agreement"], line["draft/halves_kept"]) == (None, 0.5)


def test_the_policy_that_samples_drafts(tmp_path):
    """By nft that is the old policy, which after an iteration is not the live one: the draft still ranks to the digit."""
    algorithm = {**BY_EULER, "likelihood": FOLLOWING}
    run = trainer(settings(tmp_path, algorithm=algorithm, train__iterations=3, **DRAFT), held_out=0)
    apart, real, swapped = [], run._starts, run.weights.swap

    def starts(iteration, groups):
        here = [p.detach().clone() for p in run.weights.parameters]
        with torch.no_grad(), swapped(run.weights._old):
            apart.append(max(float((p - q).abs().max()) for p, q in zip(here, run.weights.parameters, strict=True)))
        return real(iteration, groups)

    run._starts = starts
    run.run()
    assert apart[1] > 0
    assert all(line["draft/rank_agreement"] == pytest.approx(1) for line in lines(run))


def test_a_resumed_run_drafts_as_the_whole_one(tmp_path):
    whole = trainer(settings(tmp_path / "whole", train__iterations=2, **DRAFT), held_out=0)
    whole.run()
    shutil.copytree(whole.folder, tmp_path / "parts" / "r")
    cut_back(tmp_path / "parts" / "r", 1)
    parts = resumed(trainer(settings(tmp_path / "parts", train__iterations=2, **DRAFT), held_out=0))
    assert lines(whole) == lines(parts)
    assert not differing(whole, parts)


# Of four seeds by two: with fewer steps, and a picture of another size, whose noise has another shape.
CALLS = [{"num_inference_steps": 2}, {"height": 8, "width": 8}, {"num_inference_steps": 2, "height": 8}]

LOW = {"precision": "int8"}


def drafting(tmp_path, call, *, likelihood=(), precision=None, **options):
    """A run whose rollouts are ODE chains, of starts that a draft chooses unless its call is None."""
    draft = None if call is None else {"pool": 2, "call": call, "precision": precision}
    algorithm = {**BY_EULER, "likelihood": dict(likelihood)}
    return pictures(tmp_path, algorithm, draft=draft, **{"group_size": 2, **options})


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Such a run without a draft, which never begins."""
    return drafting(tmp_path_factory.mktemp("plain"), None)


@pytest.mark.parametrize(
    ("call", "cheap"),
    cases([*((call, {}) for call in CALLS), ({}, LOW), (CALLS[0], LOW)], [(CALLS[2], {}), ({}, LOW)]),
    ids=json.dumps,
)
def test_the_best_and_the_worst_start_of_a_draft_are_sampled_as_if_there_had_been_none(tmp_path, plain, call, cheap):
    run = drafting(tmp_path, call, **cheap)
    batches, sizes, rollout, generate = [], [], run.rollout, run.policy.generate

    def watched(rows):
        samples = generate(rows)
        sizes.append(tuple(samples.shape[2:]))
        return samples

    run.rollout = lambda *args: batches.append(rollout(*args)) or batches[-1]
    run.policy.generate = watched
    run.run()
    (batch,) = batches
    assert set(sizes) == {(call.get("height", 16), call.get("width", 16))}
    (line,) = lines(run)
    assert line["cost/decoded"] == 4 + 8
    steps = call.get("num_inference_steps", 4)
    assert line["cost/rollout_evaluations"] == 4 * 4 + 8 * steps

    roots, rows, places = [batch.tree.nodes[leaf].root for leaf in batch.tree.leaves], [], []
    for group in range(2):
        text = run.train_prompts[batch.groups.prompts[group]].text
        pool = [Row(text, noise.seed(0, "start", 0, group, start)) for start in range(4)]
        seeds = [root.row.seed for root in roots if root.group == group]
        chosen = [row for seed in seeds for row in pool if row.seed == seed]
        with plain.policy.call_overrides(**call):
            drafts = torch.stack([plain.policy.generate([row])[0].mean() for row in pool])
        if not cheap:
            assert {row.seed for row in chosen} == {pool[int(drafts.argmax())].seed, pool[int(drafts.argmin())].seed}
        rows, places = rows + chosen, places + [pool.index(row) for row in chosen]
    assert max(places) > 1  # not merely the first, without a draft
    algorithm = plain.config.algorithm
    direct = walk(
        plain.policy,
        algorithm.plan(algorithm.kernel.kernels(4), 2, 0, 0),
        [Root(root.group, root.index, row) for root, row in zip(roots, rows, strict=True)],
        **{"micro_batch": 8, "seed": 0, "iteration": 0},
    )
    assert torch.equal(direct.samples[0], batch.tree.samples[0])


def drafts_of(run):
    """The first call of each draft of a run, its samples, and the weights that made them."""
    found, generate, starts = [], run.policy.generate, run._starts

    def watched(rows):
        samples = generate(rows)
        if found and len(found[-1]) == 1:
            found[-1] += [rows, samples]
        return samples

    def watched_starts(iteration, groups):
        found.append([[p.detach().clone() for p in run.weights.parameters]])
        return starts(iteration, groups)

    run.policy.generate, run._starts = watched, watched_starts
    run.run()
    return found


@pytest.mark.parametrize("lora", [True, False])
def test_the_weights_that_sample_draft_in_low_precision_as_they_are(tmp_path, lora):
    """By nft these are the old policy's, from iteration to iteration others: each draft is what they are in int8."""
    options = {"groups": 1, "iterations": 2, "learning_rate": 0.01, "likelihood": FOLLOWING, "lora": lora}
    first, second = drafts = drafts_of(drafting(tmp_path, {}, precision="int8", **options))
    assert not all(map(torch.equal, first[0], second[0]))
    for weights, rows, samples in drafts:
        like = drafting(tmp_path / "like", None, lora=lora)
        like.weights.put(weights)
        with torch.no_grad():
            whole = like.policy.generate(rows)
            for network in like.policy.modules.values():
                put_layers(network, "int8")
            low = like.policy.generate(rows)
        assert torch.equal(samples, low)
        assert not torch.equal(low, whole)


@pytest.mark.parametrize("lora", [True, pytest.param(False, marks=pytest.mark.zoo)])
def test_a_precision_changes_which_starts_go_on_and_nothing_of_them(tmp_path, lora):
    """Of starts that go on with either, the samples are the same to the bit."""
    found, sizes = [], {"lora": lora, "group_size": 6, "groups": 2, "micro_batch": 8}
    for precision in (None, "int8"):
        run = drafting(tmp_path / str(precision), {}, precision=precision, **sizes)
        batch = run.rollout(0, run.groups(0))
        seeds = [batch.tree.nodes[leaf].root.row.seed for leaf in batch.tree.leaves]
        found.append((dict(zip(seeds, batch.tree.samples[0], strict=True)), batch.draft_rewards))
    (plain, rewards), (low, told) = found
    assert not all(torch.equal(a, b) for a, b in zip(rewards, told, strict=True))
    both = plain.keys() & low.keys()
    assert len(both) >= 6
    for seed in both:
        torch.testing.assert_close(plain[seed], low[seed], rtol=0, atol=1e-6)  # in batches of other starts


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.quantise=int8"], "train.draft.precision: the base is quantised already, by model.quantise=int8"),
        (["run.sharding=fsdp2"], "run.sharding: the copy of the network that train.draft.precision=int8"),
    ],
)
def test_what_does_not_go_with_a_copy_is_refused_before_anything_is_loaded(workplace, capsys, overrides, said):
    draft = "train.draft={pool: 2, precision: int8}"
    assert main(["train", "tiny.yaml", draft, *overrides]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (workplace / "runs").exists()


def test_a_plan_counts_what_a_draft_costs():
    def planned(**model):
        written = {"model": {"path": "shapes", **model}, "algorithm": {"preset": "flow_grpo_window"}}
        for draft in (None, {"pool": 3, "call": {"num_inference_steps": 5}}):
            chosen = config.validate({**written, "train": {"groups": 2, "group_size": 4, "draft": draft}})
            yield plan(chosen), forwards(chosen)

    (plain, passes), (drafted, more) = planned()
    assert (plain["drafted"], drafted["drafted"]) == (0, 24)
    assert drafted["model_evaluations"]["rollout"] - plain["model_evaluations"]["rollout"] == 24 * 5
    assert drafted["decoded"] - plain["decoded"] == drafted["reward_calls"] - plain["reward_calls"] == 24
    assert more - passes == 24 * 5
    (alone, _), (together, _) = planned(call={"guidance_scale": 4.0})
    assert together["model_evaluations"]["rollout"] - alone["model_evaluations"]["rollout"] == 2 * 24 * 5


def test_an_argument_that_a_draft_s_call_does_not_have_is_named_by_its_place():
    written = {"model": {"path": "shapes"}, "train": {"draft": {"call": {"hight": 32}}}}
    with pytest.raises(InputError, match=r"train.draft.call.hight: .* did you mean 'height'"):
        plan(config.validate(written))


@pytest.mark.zoo  # runs that encode their prompts first draft by command too
def test_a_run_by_command_drafts_at_a_lower_resolution_in_one_step(workplace):
    draft = "train.draft={pool: 2, call: {height: 8, width: 8, num_inference_steps: 1}}"
    assert main(["train", "tiny.yaml", "train.iterations=1", draft, *BRIEF]) == 0
    (line,) = metrics(next((workplace / "runs").iterdir()))
    assert -1 <= line["draft/rank_agreement"] <= 1
    assert line["policy/grad_norm"] > 0
