"""Cheap finishes in runs: what they leave as it is, what they count, what is told of them, and what is refused."""

import functools
import json
import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from cases import cases
from cut_back import cut_back
from field import lines, settings, weights_of
from low_layers import put_layers
from pictures import pictures
from runs import metrics

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.errors import InputError
from flowgrpo.flow.planning.iteration_forecast import exact_finish_cost, predict_cost
from flowgrpo.flow.rollouts.cheap_finishes import agreement, check_policy
from flowgrpo.flow.rollouts.rollout import Pair
from flowgrpo.training.weights import sharding
from flowgrpo.training.weights.low_precision_copies import Copies
from rewards import Reward

BRUSH = {"preset": "tempflow", "tree": {"branches": 3}}
TWIGS = {"preset": "stepwise_flow_grpo", "tree": {"length": None}}
CHEAP = [{"dtype": "bfloat16"}, {"dtype": "int8"}, {"dtype": "fp8"}]


FEWER = {"steps": 2}
ALL = {"steps": 2, "dtype": "int8"}


def name_of(value):
    return {"tempflow": "brush", "stepwise_flow_grpo": "twigs"}.get(getattr(value, "get", {}.get)("preset"), str(value))


def finishing(algorithm, finish):
    return {**algorithm, "tree": {**algorithm["tree"], "finish": finish}}


def rolled(run):
    """The batch of a run's first rollout."""
    return run.rollout(0, run.groups(0))


@pytest.fixture(scope="module")
def plain_of(tmp_path_factory):
    """The batch of a tree without a cheap finish, by its algorithm and whether adapters are trained."""

    @functools.cache
    def made(is_brush, lora):
        algorithm = BRUSH if is_brush else TWIGS
        return rolled(pictures(tmp_path_factory.mktemp("plain"), algorithm, lora=lora, group_size=3))

    return made


def samples_of(tree):
    """Samples by the root, the path and the role of their leaves."""
    nodes = [tree.nodes[leaf] for leaf in tree.leaves]
    return dict(zip([(node.root, node.path, node.role) for node in nodes], tree.samples[0], strict=True))


@pytest.mark.parametrize(
    ("algorithm", "finish", "lora"),
    cases(
        product((BRUSH, TWIGS), CHEAP, (True, False)),
        [(BRUSH, CHEAP[0], True), (TWIGS, CHEAP[1], True), (BRUSH, CHEAP[1], False), (BRUSH, CHEAP[2], True)],
    ),
    ids=name_of,
)
def test_a_cheap_finish_changes_samples_and_no_trained_step(tmp_path, plain_of, algorithm, finish, lora):
    plain = plain_of(algorithm is BRUSH, lora)
    cheap = rolled(pictures(tmp_path, finishing(algorithm, {**finish, "check": 0}), lora=lora, group_size=3))
    trained, alike = ([e for e in batch.tree.evaluations if e.trained] for batch in (plain, cheap))
    assert len(trained) == len(alike) > 0
    for a, b in zip(trained, alike, strict=True):
        for edges, like in zip(a.trained, b.trained, strict=True):
            assert torch.equal(edges.log_prob, like.log_prob)
            assert all(torch.equal(x, y) for x, y in zip(edges.next_state, like.next_state, strict=True))
    samples, others = samples_of(plain.tree), samples_of(cheap.tree)
    assert samples.keys() == others.keys()
    assert max(float((x - others[key]).abs().max()) for key, x in samples.items()) > 0
    assert plain.finished is None


@pytest.mark.parametrize(
    ("algorithm", "finish"),
    cases(product((BRUSH, TWIGS), (FEWER, *CHEAP, ALL)), [(BRUSH, FEWER), (BRUSH, CHEAP[1]), (TWIGS, ALL)]),
    ids=name_of,
)
def test_plan_and_run_agree_also_where_finishes_are_compared(tmp_path, algorithm, finish):
    checked, iterations = finishing(algorithm, {**finish, "check": 2}), 3 if finish is CHEAP[-1] else 2
    run = pictures(tmp_path, checked, iterations=iterations, group_size=3, learning_rate=1e-3)
    run.run()
    cost, (evaluations, decoded) = predict_cost(run.config, 4), exact_finish_cost(run.config, 4)
    assert evaluations > 0
    assert len(lines(run)) == iterations
    for i, line in enumerate(lines(run)):
        due = i % 2 == 0
        assert line["cost/rollout_evaluations"] == cost.rollout + due * evaluations
        assert line["cost/decoded"] == cost.decoded + due * decoded
        assert line.get("cost/check_evaluations", 0) == due * evaluations
        assert ("finish/rank_agreement" in line) == due
        assert not [key for key in line if key.startswith("draft/")]
        if due:
            assert -1 <= line["finish/rank_agreement"] <= 1
        assert line["policy/max_abs_log_ratio"] == 0


@pytest.mark.parametrize("algorithm", cases((BRUSH, TWIGS), (BRUSH,)), ids=name_of)
def test_finishes_that_are_exact_agree_and_comparing_them_changes_nothing(tmp_path, algorithm):
    """Whatever a reward draws; the samples that are compared meet other rows, so values differ by rounding.

    Of one group, for a reward that draws while the next group is decoded draws what the pipeline's seeds leave it.
    """

    def noisy(images, prompts):
        return [float(image.mean()) + 1e-9 * float(torch.rand(())) for image in images]

    runs, sizes = [], {"groups": 1, "group_size": 3, "iterations": 2, "learning_rate": 1e-3}
    for name, finish in (("never", None), ("always", {"check": 1})):
        run = pictures(tmp_path / name, finishing(algorithm, finish), rewards=[Reward("noisy", noisy)], **sizes)
        torch.manual_seed(3)
        run.run()
        runs.append(run)
    never, always = runs
    assert all(torch.equal(x, weights_of(always)[name]) for name, x in weights_of(never).items())
    costs = [f"cost/{key}" for key in ("check_evaluations", "rollout_evaluations", "model_evaluations", "decoded")]
    for plain, line in zip(lines(never), lines(always), strict=True):
        assert line["finish/rank_agreement"] > 0.9
        assert line["finish/reward_drift"] < 1e-3
        apart = ("finish/rank_agreement", "finish/reward_drift", *costs)
        one, other = ({k: v for k, v in own.items() if k not in apart} for own in (plain, line))
        assert one == other


def test_a_number_alone_is_the_number_of_steps(tmp_path):
    number, written = (
        settings(tmp_path, algorithm=finishing(BRUSH, finish), train__group_size=6) for finish in (2, {"steps": 2})
    )
    assert number == written


def test_the_correlation_and_the_drift_within_siblings():
    pairs = [
        *(Pair((0, 1, 1), cheap, exact) for cheap, exact in ((1, 10), (2, 20), (3, 30), (math.nan, 0), (9, math.nan))),
        *(Pair((0, 1, 2), cheap, exact) for cheap, exact in ((101, 2), (102, 1), (103, 4), (104, 3))),  # 0.6
        *(Pair((0, 2, 1), 5.0, exact) for exact in (1, 2)),  # the cheap ones are equal: no correlation
    ]
    drift = (18 / (200 / 3) ** 0.5 + 100 / 1.25**0.5 + 3.5 / 0.25**0.5) / 3
    found = {"finish/rank_agreement": pytest.approx((1 + 0.6) / 2), "finish/reward_drift": pytest.approx(drift)}
    assert agreement(pairs) == found
    assert agreement([]) == {"finish/rank_agreement": None, "finish/reward_drift": None}


def test_what_is_compared_are_the_siblings_of_the_first_group_by_both_finishes(tmp_path):
    batch = rolled(pictures(tmp_path, finishing(BRUSH, {"dtype": "int8"})))
    plain = rolled(pictures(tmp_path / "exact", BRUSH))
    exact, cheap = (
        {
            b.tree.nodes[leaf].path: float(value)
            for leaf, value in zip(b.tree.leaves, b.scores.values[:, 0], strict=True)
            if b.tree.nodes[leaf].root.group == 0
        }
        for b in (plain, batch)
    )
    first = sorted((cheap[path], value) for path, value in exact.items())
    found = sorted((pair.cheap, pair.exact) for pair in batch.finished.pairs)
    assert found == [pytest.approx(own, abs=1e-6) for own in first]
    sets = {pair.siblings for pair in batch.finished.pairs}
    assert len(sets) == 2 * 3  # seeds, and steps
    assert batch.finished.decoded == len(first)


@pytest.mark.parametrize(("word", "shared"), [("int8", True), ("bfloat16", False)])
def test_drafts_and_finishes_share_a_copy_where_they_ask_for_the_same(tmp_path, word, shared):
    draft = {"pool": 2, "call": {"num_inference_steps": 2}, "precision": "int8"}
    run = pictures(tmp_path, finishing(BRUSH, {"dtype": word}), group_size=3, draft=draft)
    assert (run.copies._of_drafts is run.copies._of_finishes) == shared
    assert rolled(run).finished.pairs


def test_weights_that_learn_are_copied_once_in_a_rollout_and_anew_in_the_next(tmp_path):
    own = finishing(BRUSH, {"dtype": "int8"})
    run = pictures(tmp_path, own, lora=False, group_size=3, iterations=2, learning_rate=1e-2)
    seen, finish = [], run.policy.finish

    def watched(*args):
        seen.append(run.copies._of_finishes._copies)
        return finish(*args)

    run.policy.finish = watched
    run.run()
    apart = list(dict.fromkeys(map(id, seen)))
    assert len(seen) > len(apart) == 2
    assert not all(torch.equal(a.codes, b.codes) for a, b in zip(seen[0], seen[-1], strict=True))
    assert run.copies._of_finishes._copies is None


@pytest.mark.parametrize("word", ["int8", "fp8"])
def test_a_finish_in_eight_bits_is_what_a_network_of_such_layers_samples(tmp_path, word):
    run = pictures(tmp_path, finishing(BRUSH, {"dtype": word}), group_size=3)
    calls, finish = [], run.policy.finish
    run.policy.finish = lambda *args: calls.append((args, finish(*args))) or calls[-1][1]
    rolled(run)
    plain = pictures(tmp_path / "plain", BRUSH)
    rows = calls[0][0][2]
    plain.policy.start(rows)
    whole = plain.policy.finish(*calls[0][0])
    for network in plain.policy.modules.values():
        put_layers(network, word)
    assert torch.equal(plain.policy.finish(*calls[0][0])[0], calls[0][1][0])
    assert not torch.equal(whole[0], calls[0][1][0])


def test_a_tree_that_is_kept_is_finished_all_the_same(tmp_path):
    first = []
    for name, trees in (("kept", {"every": 1, "prompts": 1}), ("plain", None)):
        run = pictures(tmp_path / name, finishing(BRUSH, {"dtype": "int8"}), trees=trees, group_size=3)
        run.run()
        first.append(lines(run)[0])
    assert first[0] == first[1]


def told(folder):
    """The training lines of a run without its times and its memory."""
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in metrics(folder)]


def test_a_run_by_command_drafts_and_finishes_cheaply_resumes_to_the_bit_and_costs_what_is_planned(workplace, capsys):
    words = [
        "algorithm={preset: tempflow, tree: {branches: 2, finish: {dtype: int8}}}",
        "train.draft={pool: 2, call: {num_inference_steps: 2}, precision: int8}",
        *("train.groups=1", "train.updates=1", "train.micro_batch=8", "eval={every: 9, prompts: 1, save: 0}"),
    ]
    assert main(["train", "tiny.yaml", *words]) == 0
    whole = told(workplace / "runs" / "t")
    cut_back(workplace / "runs" / "t", 1)
    assert main(["train", "tiny.yaml", "run.resume=true", *words]) == 0
    assert told(workplace / "runs" / "t") == whole
    assert all(-1 <= line["draft/rank_agreement"] <= 1 for line in whole)
    capsys.readouterr()
    assert main(["plan", "tiny.yaml", "--format", "json", *words]) == 0
    planned = json.loads(capsys.readouterr().out)
    compares = planned["comparison"]
    assert compares["every"] == 10
    first, second = whole
    assert first["cost/rollout_evaluations"] == planned["model_evaluations"]["rollout"] + compares["model_evaluations"]
    assert second["cost/rollout_evaluations"] == planned["model_evaluations"]["rollout"]
    assert first["cost/check_evaluations"] == compares["model_evaluations"]
    assert first["cost/decoded"] == planned["decoded"] + compares["decoded"]
    assert main(["plan", "tiny.yaml", *words]) == 0
    assert "every 10 iterations, from the first:" in " ".join(capsys.readouterr().out.split())


KEY = r"algorithm\.tree\.finish"


@pytest.mark.parametrize(
    ("algorithm", "more", "said"),
    [
        ({"tree": {"name": "chain", "finish": 2}}, {}, r"algorithm\.tree\.finish: unknown key"),
        (finishing(BRUSH, {"dtype": "int4"}), {}, rf"{KEY}\.dtype: 'int4' is not allowed"),
        (finishing(BRUSH, 0), {}, rf"{KEY}\.steps: 0 is wrong"),
        (finishing(BRUSH, CHEAP[1]), {"model__quantise": "int8"}, rf"{KEY}\.dtype: the base is quantised already"),
        (finishing(BRUSH, CHEAP[0]), {"model__dtype": "bfloat16"}, rf"{KEY}\.dtype: the network computes in bfl"),
        (finishing(BRUSH, CHEAP[1]), {"run__sharding": "fsdp2", "run__processes": 2}, r"run\.sharding: the copy .*"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(tmp_path, algorithm, more, said):
    own = {"model__path": "shapes", "model__lora": {"rank": 2}, "train__group_size": 6, **more}
    with pytest.raises(InputError, match=said):
        sharding.check(settings(tmp_path, algorithm=algorithm, **own))


@pytest.mark.parametrize(
    ("preset", "tree"),
    [
        ("vgpo", {}),  # one jump, which shares the chain's evaluation
        ("tempflow", {"profile": [0] * 5 + [3], "branches": 3, "last_step": "sde"}),
    ],
)
def test_a_tree_without_finishes_is_one_sentence(preset, tree):
    algorithm = {"preset": preset, "tree": {**tree, "finish": CHEAP[1]}}
    train = {"groups": 2, "group_size": 6, "updates": 1}
    chosen = config.validate({"model": {"path": "shapes"}, "algorithm": algorithm, "train": train})
    with pytest.raises(InputError, match=rf"{KEY}: no evaluation of this \w+ is of ODE steps that only lead to a rew"):
        predict_cost(chosen, 6)


def test_a_pipeline_that_pins_is_one_sentence(tmp_path):
    cheap, fewer = (
        settings(tmp_path, algorithm=finishing(BRUSH, finish), train__group_size=6) for finish in (CHEAP[1], FEWER)
    )
    check_policy(cheap, SimpleNamespace(pins=False))
    check_policy(fewer, SimpleNamespace(pins=True))
    with pytest.raises(InputError, match=rf"{KEY}: this pipeline pins a part of what it samples"):
        check_policy(cheap, SimpleNamespace(pins=True))


def test_no_copy_is_made_where_none_is_asked_for(tmp_path):
    chosen = settings(tmp_path, algorithm=BRUSH, train__group_size=6)
    copies = Copies(chosen, [torch.nn.Linear(2, 2)])
    with copies.keep(), copies.drafting(), copies.finishing():
        pass
    assert (copies._of_drafts, copies._of_finishes) == (None, None)
