"""Graphs that a rollout keeps for the first update: the numbers of a replay, without its calls."""

import gc
import math

import pytest
import torch
from field import Network, credit, lines, settings, step_in_place, trainer, weights_of

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow import graphs
from flowgrpo.flow.pipeline.field import FieldPolicy
from flowgrpo.flow.predicted import predicted
from flowgrpo.training.out_of_memory import OutOfMemory
from samplers.schedule import linear_sigmas
from samplers.trees import Tree

# Chains with a divergence, windows, brushes with all their edges at one state, branches, twigs; one part and two.
RUNS = [
    ("flow_grpo", {}, {"objective": {"kl": {"beta": 0.1}}}),
    ("flow_grpo", {"train__split": "samples", "train__micro_batch": 5}, {}),
    ("flow_grpo_fast", {"train__updates": 1}, {"tree": {"size": 2}}),
    ("tempflow", {}, {"tree": {"branches": 4}}),
    ("branch_grpo", {"train__updates": 1}, {"tree": {"splits": [0, 1, 2], "prune": None}}),
    ("dense_grpo", {}, {}),
    ("grpo_guard", {}, {}),
]


def run_of(folder, replay, preset, overrides, algorithm, **options):
    chosen = settings(
        folder / replay,
        **{
            "train__iterations": 3,
            "train__updates": 2,
            "train__replay": replay,
            "algorithm": {"preset": preset, **algorithm},
            "eval__every": 9,
            **overrides,
        },
    )
    done = trainer(chosen, held_out=0, **options)
    done.run()
    return done


@pytest.mark.parametrize(("preset", "overrides", "algorithm"), RUNS)
def test_a_run_that_keeps_graphs_is_the_run_that_replays_to_the_bit(tmp_path, preset, overrides, algorithm):
    replays, keeps = (run_of(tmp_path, word, preset, overrides, algorithm) for word in ("always", "never"))
    for name, tensor in weights_of(replays).items():
        assert torch.equal(weights_of(keeps)[name], tensor), name
    spared = predicted(replays.config, 6).graphs
    assert spared > 0
    for one, other in zip(lines(replays), lines(keeps), strict=True):
        for key in ("cost/update_evaluations", "cost/model_evaluations"):
            assert other.pop(key) == one.pop(key) - spared
        assert other == one
        assert one["policy/grad_norm"] > 0


def test_a_graph_goes_backward_once_and_is_gone(tmp_path):
    run = trainer(settings(tmp_path, train__replay="never", train__updates=1), held_out=0)
    run.keep_graphs = (0,)
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


def test_rows_that_are_gathered_anew_are_replayed(tmp_path):
    """A step without a finite log-probability leaves the update; what is left has other calls than the rollout."""
    losses = []
    for word in ("always", "never"):
        run = trainer(settings(tmp_path / word, train__replay=word, train__updates=1), held_out=0)
        run.keep_graphs = (0,) if word == "never" else ()
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
        (
            {"algorithm": {"preset": "branch_grpo", "tree": {"prune": {"rule": "parent_top1"}}}},
            "algorithm.tree.prune.rule=",
        ),
        ({"run__staleness": 1}, "run.staleness=1"),
    ],
)
def test_never_is_refused_where_an_update_calls_the_model_anew(tmp_path, written, setting):
    auto = settings(tmp_path, **written)
    assert graphs.hindrance(auto).startswith(setting)
    assert graphs.kept_parts(auto, None, None, rows=1, exchange=None) == ()
    with pytest.raises(InputError, match=f"^train.replay: with {setting}.*take auto$"):
        settings(tmp_path, **written, train__replay="never")


@pytest.mark.parametrize(("room", "kept"), [(2.0, (0,)), (1.99, ())])
def test_auto_keeps_what_fits_into_half_of_the_free_memory_of_every_process(tmp_path, monkeypatch, room, kept):
    run = trainer(settings(tmp_path, train__micro_batch=32, train__iterations=1), held_out=0)
    row = Row("bb", 0)
    each = graphs.graph_bytes(run.policy, run.policy.start([row]), row)
    monkeypatch.setattr(graphs, "_free", lambda device: room * each * 80)
    run.run()
    assert run.keep_graphs == kept
    assert lines(run)[0]["cost/update_evaluations"] == 2 * 32 * 5 - (80 if kept else 0)
    told = []

    class Exchange:
        accelerator = run.accelerator

        def sum(self, value):
            told.append(float(value))
            return value + 1  # another process has no room

    assert graphs.kept_parts(run.config, run.policy, row, rows=80, exchange=Exchange()) == ()
    assert told == [0.0 if kept else 1.0]
    # Calls whose size was found take a little themselves.
    peak = graphs.probing.taken_bytes(torch.device("cpu")) + 2**30
    assert graphs.kept_parts(run.config, run.policy, row, rows=80, exchange=run.exchange, peak=peak) == ()


class Full(Network):
    """A network that runs out of memory in the first rollout that keeps graphs."""

    calls = 0

    def forward(self, x, sigma, rows):
        self.calls += 1
        if self.calls == self.last and torch.is_grad_enabled():
            torch.rand(1)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().forward(x, sigma, rows)


@pytest.mark.parametrize("word", ["auto", "never"])
def test_a_rollout_without_room_for_its_graphs_is_made_again_without_them(tmp_path, word):
    """Unless they are asked for: then the run ends in a sentence."""
    runs = {}
    for name, last in (("whole", 0), ("full", 10)):
        network = Full()
        network.last = last
        chosen = settings(tmp_path / name, train__replay=word, train__iterations=2, train__updates=1)
        runs[name] = trainer(chosen, network, held_out=0)
    runs["whole"].run()
    if word == "never":
        with pytest.raises(OutOfMemory):
            runs["full"].run()
        return
    runs["full"].run()
    assert (runs["whole"].keep_graphs, runs["full"].keep_graphs) == ((0,), ())
    for name, tensor in weights_of(runs["whole"]).items():
        assert torch.equal(weights_of(runs["full"])[name], tensor), name
    said = (runs["full"].folder / "log.txt").read_text()
    assert (
        "step 1: out of memory in the rollout phase; the update calls the model anew (train.replay) from here on"
        in said
    )
    again, once = (lines(runs[name])[0]["cost/rollout_evaluations"] for name in ("full", "whole"))
    assert again == once  # what was thrown away is not counted


def test_an_update_that_runs_out_of_memory_lets_go_of_all_graphs(tmp_path):
    """It is the reference that is called first, beside the graphs of the whole iteration."""
    network, alive = Network(), []
    run = trainer(settings(tmp_path, train__iterations=1, train__updates=1), network, held_out=0)
    real = run.weights.reference

    def reference():
        trees = [tree for tree in gc.get_objects() if isinstance(tree, Tree)]
        alive.append(sum(e.velocity is not None for tree in trees for e in tree.evaluations))
        if len(alive) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real()

    run.weights.reference = reference
    run.run()
    assert alive[0] > 1
    assert set(alive[1:]) == {0}
    replays = run_of(tmp_path, "always", "flow_grpo", {"train__iterations": 1, "train__updates": 1}, {})
    assert replays.config.algorithm.objective.kl.beta == run.config.algorithm.objective.kl.beta > 0
    for name, tensor in weights_of(replays).items():
        assert torch.equal(weights_of(run)[name], tensor), name


def test_a_reward_that_runs_out_of_memory_lets_go_of_graphs_too(tmp_path):
    calls = []

    def hungry(samples, prompts):
        calls.append(len(samples))
        if run.keep_graphs:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return [0.5 * (i % 3) for i in range(len(samples))]

    run = trainer(settings(tmp_path, train__iterations=1, train__updates=1), reward=hungry, held_out=0)
    run.run()
    assert run.keep_graphs == ()
    assert (
        "step 1: out of memory in the rewards phase; the update calls the model anew"
        in (run.folder / "log.txt").read_text()
    )


def test_what_a_graph_keeps_is_counted_for_one_row():
    """Of tanh(A x) B a graph keeps x and the tanh, of the sum nothing; and the velocity itself is there."""
    policy = FieldPolicy(Network(), (2,), linear_sigmas(6, 3.0))
    row = Row("a", 0)
    state = policy.start([row])
    counted = graphs.graph_bytes(policy, state, row)
    assert 4 * (4 + 16 + 2) <= counted <= 4 * (4 + 16 + 2) + 64  # and numbers of the time and the prompt
    assert not any(p.grad is not None for p in policy.modules["field"].parameters())
