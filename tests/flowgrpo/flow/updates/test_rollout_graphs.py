"""Graphs that a rollout keeps for the first update: the numbers of a replay, without its calls."""

import math
from functools import partial

import in_graphs
import pytest
import tiny
import torch
from field import Network, credit, differing, lines, settings, step_in_place, trainer, weights_of
from in_graphs import run_of
from pair import pair
from pictures import pictures

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.flow.pipeline.velocity_field import FieldPolicy
from flowgrpo.flow.planning.iteration_forecast import predict_cost
from flowgrpo.flow.updates import rollout_graphs
from flowgrpo.training.planning.allocation_counter import AllocationCounter
from samplers.schedule import linear_sigmas

# Chains with a divergence, windows, brushes with all their edges at one state, branches, twigs; one part and two.
RUNS = [
    ("flow_grpo", {}, {"objective": {"kl": {"beta": 0.1}}}),
    ("flow_grpo", {"train__split": "samples", "train__micro_batch": 9}, {}),
    ("flow_grpo_fast", {"train__updates": 1}, {"tree": {"size": 2}}),
    ("tempflow", {}, {"tree": {"branches": 4}}),
    ("branch_grpo", {"train__updates": 1}, {"tree": {"splits": [0, 1, 2], "prune": None}}),
    ("branch_grpo", {"train__updates": 1}, {"tree": {"splits": [0, 1, 2], "prune": {"rule": "depth"}}}),
    ("dense_grpo", {}, {"kernel": {"calibrate": {"rounds": 1}}}),
    ("grpo_guard", {}, {}),
]


@pytest.mark.parametrize(("preset", "overrides", "algorithm"), RUNS)
def test_a_run_that_keeps_graphs_is_the_run_that_replays_to_the_bit(tmp_path, preset, overrides, algorithm):
    overrides = {"train__iterations": 2, **overrides}
    replays, keeps = (run_of(tmp_path, word, preset, overrides, algorithm) for word in ("always", "never"))
    assert not differing(replays, keeps)
    spared = predict_cost(replays.config, 6).graphs
    assert spared > 0
    for one, other in zip(lines(replays), lines(keeps), strict=True):
        for key in ("cost/update_evaluations", "cost/model_evaluations"):
            assert other.pop(key) == one.pop(key) - spared
        assert other == one
        assert one["policy/grad_norm"] > 0


def test_a_graph_goes_backward_once_and_is_gone(tmp_path):
    run = trainer(settings(tmp_path, train__replay="never", train__updates=1), held_out=0)
    run.kept_graphs.steps = 5
    batch = run.rollout(0, run.groups(0))
    evaluations = [e for e in batch.tree.evaluations if e.trained]
    assert all(e.velocity[0].requires_grad for e in evaluations)
    assert not any(e.state[0].requires_grad for e in evaluations)
    begun = run.policy.evaluations
    credited = credit(run, batch)
    step_in_place(run, credited)
    assert run.policy.evaluations - begun == 32 * 5  # those of the reference
    assert all(e.velocity is None for e in evaluations)
    kept = [p.grad.clone() for p in run.weights.parameters]
    step_in_place(run, credited)  # now by a replay
    assert all(torch.equal(p.grad, own) for p, own in zip(run.weights.parameters, kept, strict=True))


def test_a_drift_is_measured_where_graphs_are_kept(tmp_path):
    """By a second call, for a graph meets its own log-probabilities; it changes no gradient and no count."""
    found = []
    for moved in (0.0, 0.1):
        run = trainer(settings(tmp_path / str(moved), train__replay="never", train__updates=1), held_out=0)
        run.kept_graphs.steps = 5
        credited = credit(run, run.rollout(0, run.groups(0)))
        for p in run.weights.parameters:
            p.data += moved  # behind the back of the graphs
        counted = run.policy.evaluations
        found.append(step_in_place(run, credited))
        assert run.policy.evaluations == counted + 32 * 5  # those of the reference
    still, drifted = found
    assert still.max_abs_log_ratio == still.sum_abs_log_ratio == drifted.sum_abs_log_ratio == 0
    assert drifted.max_abs_log_ratio > 1e-3


def test_rows_that_are_gathered_anew_are_replayed(tmp_path):
    """A step without a finite log-probability leaves the update; what is left has other calls than the rollout."""
    losses = []
    for word in ("always", "never"):
        run = trainer(settings(tmp_path / word, train__replay=word, train__updates=1), held_out=0)
        run.kept_graphs.steps = 5 if word == "never" else 0
        batch = run.rollout(0, run.groups(0))
        batch.tree.evaluations[0].edges[0].log_prob[0] = math.nan
        credited = credit(run, batch)
        assert all(e.velocity is None for e in (*batch.tree.evaluations, *credited.tree.evaluations))
        assert sum(len(edges.nodes) for e in credited.tree.evaluations for edges in e.trained) == 32 * 5 - 1
        step_in_place(run, credited)
        losses.append([p.grad.clone() for p in run.weights.parameters])
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


@pytest.mark.parametrize(
    ("written", "setting"),
    [
        ({"algorithm": {"preset": "nft"}}, "algorithm.likelihood=elbo"),
        ({"train__split": "edges"}, "train.split=edges"),
        ({"train__rollout_batch": 8}, "train.rollout_batch=8"),
        ({"train__rollout_batch": "auto", "train__micro_batch": "auto"}, "train.rollout_batch=auto"),
        ({"train__select": {"rule": "extremes", "fraction": 0.5}}, "train.select"),
        ({"algorithm": {"baseline": {"drop_zero": True}}}, "algorithm.baseline.drop_zero=true"),
        ({"algorithm": {"preset": "branch_grpo", "tree": {"prune": {"rule": "parent_top1"}}}}, "algorithm.tree.prune"),
        ({"run__staleness": 1}, "run.staleness=1"),
    ],
)
def test_never_is_refused_where_an_update_calls_the_model_anew(tmp_path, written, setting):
    auto = settings(tmp_path, **written)
    assert auto.graph_hindrance.startswith(setting)
    assert not auto.keeps_graphs
    with pytest.raises(InputError, match=f"^train.replay: with {setting}.*take auto$"):
        settings(tmp_path, **written, train__replay="never")


def test_what_a_graph_keeps_is_counted_for_one_row():
    """Of tanh(A x) B a graph keeps x and the tanh, of the sum nothing; and the velocity itself is there."""
    policy = FieldPolicy(Network(), (2,), linear_sigmas(6, 3.0))
    row = Row("a", 0)
    state = policy.start([row])
    kept, call = rollout_graphs.measure_graph(policy, state, row, size=3)
    assert kept.once <= 16
    assert 4 * (4 + 16 + 2) <= kept.once + kept.each <= 4 * (4 + 16 + 2) + 64  # and numbers of the time and the prompt
    assert 0 <= call <= 3 * 4 * 32
    assert policy.evaluations == 0
    assert not any(p.grad is not None for p in policy.modules["field"].parameters())


class Larger(Network):
    """A network that computes with a second one at low noise, and keeps a square beside."""

    def __init__(self):
        super().__init__()
        self.second = Network()

    def forward(self, x, sigma, rows):
        return super().forward(x, sigma, rows) if sigma > 0.5 else self.second(x, sigma, rows).exp().exp()


def test_of_two_networks_the_larger_graph_counts():
    policy, row = FieldPolicy(Larger(), (2,), linear_sigmas(6, 3.0)), Row("a", 0)
    kept, _ = rollout_graphs.measure_graph(policy, policy.start([row]), row, size=3)
    (field,) = policy.modules.values()
    policy.modules = {"field": field, "second": field.second}
    larger, _ = rollout_graphs.measure_graph(policy, policy.start([row]), row, size=3)
    assert larger.each - kept.each == 4 * 2  # of exp its result is kept, the last of which is the velocity itself
    assert policy.evaluations == 0


def test_copies_of_weights_are_kept_by_each_call():
    """Under autocast a graph keeps the weights in half precision, as often as the network is called."""
    policy = DiffusersPolicy(tiny.sd3(), tiny.CALLS["sd3"], autocast=torch.bfloat16)
    for p in policy.modules["transformer"].parameters():
        p.requires_grad_()
    rows = [Row("a red circle", seed) for seed in range(3)]
    kept, _ = rollout_graphs.measure_graph(policy, policy.start(rows[:1]), rows[0], size=1)
    matrices = sum(p.numel() for p in policy.modules["transformer"].parameters() if p.ndim > 1)
    assert kept.once > matrices  # two bytes each, but for those of embeddings

    def held(calls):
        with torch.enable_grad(), AllocationCounter() as counted:
            for tensor in (*policy.modules["transformer"].parameters(), *policy.modules["transformer"].buffers()):
                counted.ignore(tensor)
            state = policy.start(rows)
            counted.restart()
            velocities = [policy.velocity(state, sigma, rows) for sigma in policy.sigmas[:calls]]
            held = counted.now
            del velocities
        return held

    for calls in (1, 2):
        assert kept.of([3] * calls, size=3) == pytest.approx(held(calls), rel=0.1)
        assert kept.of([3] * calls, size=2) - kept.of([3] * calls, size=3) == calls * kept.once


@pytest.mark.parametrize(
    "model", [{"lora": True}, {"lora": False, "autocast": torch.bfloat16, "checkpointing": True}], ids=["lora", "all"]
)
def test_pipelines_have_the_weights_of_a_replay_too(tmp_path, model):
    """With adapters in float32; and with all weights, in bfloat16 and with gradient checkpointing."""
    runs, algorithm = [], {"preset": "flow_grpo", "objective": {"kl": {"beta": 0.1}}}
    for word in ("always", "never"):
        torch.manual_seed(0)
        train = {"iterations": 2, "group_size": 2, "updates": 2, "micro_batch": 3, "replay": word}
        runs.append(pictures(tmp_path / word, algorithm, **model, **train))
        runs[-1].run()
    replayed, kept = map(weights_of, runs)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in replayed.items())
    calls, fewer = (lines(run)[0]["cost/update_evaluations"] for run in runs)
    assert fewer < calls


def test_two_processes_have_the_weights_of_a_replay_too(tmp_path):
    runs = []
    for word in ("always", "never"):
        (tmp_path / word).mkdir()
        runs.append(pair(partial(in_graphs.of_two, folder=str(tmp_path), word=word), tmp_path / word)[0])
    (replayed, calls), (kept, fewer) = runs
    assert all(torch.equal(tensor, kept[name]) for name, tensor in replayed.items())
    assert fewer < calls
