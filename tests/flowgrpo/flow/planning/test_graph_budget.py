"""Whether a run keeps graphs: by the memory there is, until memory runs out, and for good."""

import gc
from types import SimpleNamespace

import pytest
import torch
from field import Network, closeness, differing, lines, settings, trainer
from in_graphs import run_of

from flowgrpo import config
from flowgrpo.data.prompts import Row
from flowgrpo.flow.planning import graph_budget
from flowgrpo.flow.planning.iteration_forecast import most_graphs, predict_cost
from flowgrpo.flow.updates import rollout_graphs
from flowgrpo.training.run.out_of_memory_error import OutOfMemory
from samplers.trees import Tree

SAID = "CUDA out of memory. Tried to allocate 2.00 GiB."


def begun(folder, network=None, reward=closeness, **options):
    """A run of one iteration of one update, unless other options are given, without held-out prompts."""
    chosen = settings(folder, **{"train__iterations": 1, "train__updates": 1, **options})
    return trainer(chosen, network, reward, held_out=0)


def wide(folder, iterations=1, **options):
    return begun(folder, train__micro_batch=32, train__iterations=iterations, train__updates=2, **options)


def graphs_of(tree):
    return sum(evaluation.velocity is not None for evaluation in tree.evaluations)


def log_of(run):
    return (run.folder / "log.txt").read_text()


def room(monkeypatch, run, times):
    """Let a process have so many times the memory that all its graphs take, beside what else will be there."""
    row, size = Row("eeeee", 0), most_graphs(run.config, 6).call_rows
    assert size < run.config.train.rollout_rows
    kept, call = rollout_graphs.measure_graph(run.policy, run.policy.start([row]), row, size=size)
    need, beside = kept.of([16] * 5, size=size), run.batch_sizes.to_come(call)
    monkeypatch.setattr(graph_budget, "free_bytes", lambda device, processes: times * need + beside)


def numbers_of(run):
    return sum(p.numel() for p in run.weights.parameters)


@pytest.mark.parametrize(("times", "kept"), [(2.0, 5), (1.99, 4), (1.2, 3), (0.4, 1), (0.39, 0)])
def test_auto_keeps_what_fits_into_half_of_the_memory_that_stays_free(tmp_path, monkeypatch, capsys, times, kept):
    run = wide(tmp_path)
    numbers = numbers_of(run)
    assert run.batch_sizes.to_come(0) == (8 + 4) * numbers  # moments, and while a rollout runs the gradients to come
    room(monkeypatch, run, times)
    run.run()
    assert run.kept_graphs.steps == kept
    assert lines(run)[0]["cost/update_evaluations"] == 2 * 32 * 5 - 16 * kept
    said = {
        5: "keep the graphs of all 5 trained steps for the first update, 80 rows in 0.00 GiB, which spare about 10%",
        3: "keep the graphs of the first 3 of 5 trained steps for the first update, 48 rows in 0.00 GiB, which spare about "
        "6% of an iteration's work; graphs of the first 4 would take 0.00 GiB, more than 50% of the 0.00 GiB that are free",
        0: "calls the model anew; graphs of the first would take 0.00 GiB, more than 50% of",
    }
    told = capsys.readouterr()
    assert said.get(kept, "") in " ".join((told.err + told.out).split())


def test_a_part_of_the_graphs_gives_the_weights_of_a_replay_to_the_bit(tmp_path):
    runs = {}
    for word in ("always", "auto"):
        runs[word] = wide(tmp_path / word, 3, train__replay=word, algorithm={"preset": "flow_grpo"})
    decide = runs["auto"].kept_graphs.decide

    def decide_two(to_come):
        decide(to_come)
        runs["auto"].kept_graphs.steps = 2

    runs["auto"].kept_graphs.decide = decide_two
    for run in runs.values():
        run.run()
    assert not differing(runs["always"], runs["auto"])
    for replayed, kept in zip(*map(lines, runs.values()), strict=True):
        assert kept["cost/update_evaluations"] == replayed["cost/update_evaluations"] - 2 * 16


@pytest.mark.parametrize(("over", "kept"), [(0, 5), (1, 4)])
def test_graphs_in_the_memory_of_a_host_add_half_of_what_the_process_takes(tmp_path, monkeypatch, capsys, over, kept):
    """Beside the graph of one call, for an update makes one anyway. Here the process takes what makes this the limit."""
    run = wide(tmp_path)
    room(monkeypatch, run, 9)
    size = most_graphs(run.config, 6).call_rows
    graph, call = rollout_graphs.measure_graph(
        run.policy, run.policy.start([Row("eeeee", 0)]), Row("eeeee", 0), size=size
    )
    one, need = graph.of([size], size=size), graph.of([16] * 5, size=size)
    others = 2 * (need - one) - run.batch_sizes.to_come(call + one) - over
    monkeypatch.setattr(graph_budget, "used_bytes", lambda device: others)
    with run.report:
        run.kept_graphs.decide(run.batch_sizes.to_come)
    assert run.kept_graphs.steps == kept
    told = capsys.readouterr()
    said = "more than what keeps the process below 1.5 times the 0.00 GiB that it takes without graphs"
    assert (said in " ".join((told.err + told.out).split())) == (over > 0)


def test_with_adapters_graphs_take_twice_their_bytes_of_a_host(tmp_path, monkeypatch, capsys):
    """Without adapters 5 steps fit into this room."""
    run = wide(tmp_path)
    room(monkeypatch, run, 2)
    adapted = run.config.model.model_copy(update={"lora": {"rank": 2}})
    monkeypatch.setattr(run.kept_graphs._run, "config", run.config.model_copy(update={"model": adapted}))
    with run.report:
        run.kept_graphs.decide(run.batch_sizes.to_come)
    assert run.kept_graphs.steps == 2
    assert "first 3 would take" in " ".join(capsys.readouterr().err.split())


def test_one_process_without_room_is_enough(tmp_path, monkeypatch, capsys):
    run = wide(tmp_path)
    room(monkeypatch, run, 9)
    monkeypatch.setattr(type(run.collectives), "gather", lambda own, counts: [*counts, 0])
    with run.report:
        run.kept_graphs.decide(run.batch_sizes.to_come)
    assert run.kept_graphs.steps == 0
    assert "more than another process has room for" in capsys.readouterr().err


def test_calls_whose_size_was_found_take_of_the_room(tmp_path, monkeypatch):
    run = wide(tmp_path)
    room(monkeypatch, run, 9)
    least = run.batch_sizes.to_come(2**30)
    run.batch_sizes._asked = ("micro_batch",)
    run.batch_sizes._tried = {"micro_batch": [{"rows": 32, "peak_bytes": 2**41, "call_bytes": 2**40}]}
    assert run.batch_sizes.to_come(2**30) == least - 12 * numbers_of(run) + 2**40 - 2**30 + 8 * numbers_of(run)
    assert run.batch_sizes.to_come(2**41) == least + 2**41 - 2**30  # one of them counts, the larger
    with run.report:
        run.kept_graphs.decide(run.batch_sizes.to_come)
    assert run.kept_graphs.steps == 0


@pytest.mark.parametrize(("times", "kept"), [(9, 5), (1, 2), (0, 0)])
def test_a_resume_that_has_more_room_does_as_the_run_did(tmp_path, monkeypatch, times, kept):
    """And one whose process takes less, so that graphs would add more to it."""
    whole = wide(tmp_path / "whole", 2)
    room(monkeypatch, whole, times)
    whole.run()
    wide(tmp_path / "half", 1).run()
    rest = wide(tmp_path / "half", 2)
    room(monkeypatch, rest, 9)
    monkeypatch.setattr(graph_budget, "used_bytes", lambda device: 0)
    rest.resume()
    rest.run()
    assert rest.kept_graphs.steps == whole.kept_graphs.steps == kept
    assert lines(rest) == lines(whole)


def test_a_resume_without_the_room_keeps_what_fits(tmp_path, monkeypatch):
    wide(tmp_path, 1).run()
    rest = wide(tmp_path, 2)
    room(monkeypatch, rest, 1)
    rest.resume()
    rest.run()
    assert rest.kept_graphs.steps == 2


@pytest.mark.parametrize(("written", "kept"), [({"graphs_given_up": True}, 0), ({"graph_steps": 3}, 3), (None, 5)])
def test_the_decision_of_a_checkpoint_holds(tmp_path, monkeypatch, written, kept):
    """An earlier version recorded only that graphs were given up."""
    run = wide(tmp_path)
    room(monkeypatch, run, 9)
    run.kept_graphs.restore(written)
    with run.report:
        run.kept_graphs.decide(run.batch_sizes.to_come)
    assert run.kept_graphs.steps == kept
    assert run.kept_graphs.state() == {"graph_steps": kept}


class Full(Network):
    """A network that runs out of memory in the first rollout that keeps graphs."""

    calls = 0

    def forward(self, x, sigma, rows):
        self.calls += 1
        if self.calls == self.last and torch.is_grad_enabled():
            torch.rand(1)
            raise torch.OutOfMemoryError(SAID)
        return super().forward(x, sigma, rows)


@pytest.mark.parametrize("word", ["auto", "never"])
def test_a_rollout_without_room_for_its_graphs_is_made_again_without_them(tmp_path, word):
    """Unless they are asked for: then the run ends in a sentence."""
    runs = {}
    for name, last in (("whole", 0), ("full", 10)):
        network = Full()
        network.last = last
        runs[name] = begun(tmp_path / name, network, train__replay=word, train__iterations=2)
    runs["whole"].run()
    if word == "never":
        with pytest.raises(OutOfMemory):
            runs["full"].run()
        return
    runs["full"].run()
    assert (runs["whole"].kept_graphs.steps, runs["full"].kept_graphs.steps) == (5, 0)
    assert not differing(runs["whole"], runs["full"])
    said = "step 1: out of memory in the rollout phase; the update calls the model anew (train.replay) from here on"
    assert said in log_of(runs["full"])
    again, once = (lines(runs[name])[0]["cost/rollout_evaluations"] for name in ("full", "whole"))
    assert again == once  # what was thrown away is not counted


def test_an_update_that_runs_out_of_memory_lets_go_of_all_graphs(tmp_path):
    """It is the reference that is called first, beside the graphs of the whole iteration."""
    run, alive = begun(tmp_path), []
    real = run.weights.reference

    def reference():
        alive.append(sum(graphs_of(tree) for tree in gc.get_objects() if isinstance(tree, Tree)))
        if len(alive) == 1:
            raise torch.OutOfMemoryError(SAID)
        return real()

    run.weights.reference = reference
    run.run()
    assert alive[0] > 1
    assert set(alive[1:]) == {0}
    replays = run_of(tmp_path, "always", "flow_grpo", {"train__iterations": 1, "train__updates": 1}, {})
    assert replays.config.algorithm.objective.kl.beta == run.config.algorithm.objective.kl.beta > 0
    assert not differing(replays, run)


def test_a_reward_that_runs_out_of_memory_lets_go_of_graphs_too(tmp_path):
    def hungry(samples, prompts):
        if run.kept_graphs.steps:
            raise torch.OutOfMemoryError(SAID)
        return [0.5 * (i % 3) for i in range(len(samples))]

    run = begun(tmp_path, reward=hungry)
    run.run()
    assert run.kept_graphs.steps == 0
    assert "step 1: out of memory in the rewards phase; the update calls the model anew" in log_of(run)


def test_a_draft_that_runs_out_of_memory_costs_no_graphs(tmp_path):
    """It has none: smaller calls help it."""
    chosen = {"train__micro_batch": "auto", "train__draft": {"pool": 2, "call": {}}}
    run = begun(tmp_path, train__iterations=2, **chosen)
    real = run._starts

    def starts(*arguments):
        if run.done == 1 and run.config.train.micro_batch > 4:
            raise torch.OutOfMemoryError(SAID)
        return real(*arguments)

    run._starts = starts
    run.run()
    assert run.kept_graphs.steps == 5
    assert run.config.train.micro_batch == 4


def test_graphs_that_calls_of_other_sizes_hinder_are_not_given_up(tmp_path):
    run = begun(tmp_path)
    run.run()
    assert run.kept_graphs.held == 5
    run.config = run.config.model_copy(update={"train": run.config.train.model_copy(update={"rollout_batch": 8})})
    assert run.kept_graphs.held == 0
    assert run.kept_graphs.give_up() is None
    assert run.kept_graphs.steps == 5


@pytest.mark.parametrize(("word", "kept"), [("auto", True), ("always", False)])
def test_memory_that_runs_out_in_an_optimizer_step_tells_whether_graphs_were_there(tmp_path, word, kept):
    """Nothing is made again then, so that they were not given up."""
    run = begun(tmp_path, train__updates=2, train__replay=word)

    def step(*_):
        raise torch.OutOfMemoryError(SAID)

    run.optimizer.step = step
    with pytest.raises(OutOfMemory) as found:
        run.run()
    assert found.value.kept_graphs == kept


@pytest.mark.parametrize("place", ["evaluation", "second part"])
def test_graphs_stay_where_memory_runs_out_without_them(tmp_path, place):
    """Where there are none, letting go of them would not help: it ends the run, as without graphs."""
    run = trainer(settings(tmp_path, train__iterations=2, train__updates=2, eval__every=1))
    method = "eval_samples" if place == "evaluation" else "take_step"
    real = getattr(run, method)

    def fails(*arguments):
        if run.done == 1 and (place == "evaluation" or arguments[1] == 1):
            raise torch.OutOfMemoryError(SAID)
        return real(*arguments)

    setattr(run, method, fails)
    with pytest.raises((OutOfMemory, torch.OutOfMemoryError)):
        run.run()
    assert run.kept_graphs.steps == 5


def test_a_part_without_weight_lets_go_of_its_graphs(tmp_path):
    """No step is taken on it, and later parts have the room."""
    run = trainer(settings(tmp_path, train__iterations=1, train__updates=2, run__patience=None))
    alive, real, credit_edges = [], run.take_step, run.credit_edges

    def update_part(credited, part):
        found = real(credited, part)
        alive.append(graphs_of(credited.tree))
        return found

    def weightless(*arguments):
        credited = credit_edges(*arguments)
        alive.append(graphs_of(credited.tree))
        credited.units.weight.zero_()
        return credited

    run.take_step, run.credit_edges = update_part, weightless
    run.run()
    assert alive[0] > 0
    assert alive[1:] == [0, 0]


def test_memory_that_runs_out_while_edges_are_credited_costs_the_graphs_at_once(tmp_path):
    run = begun(tmp_path)
    real, alive = run.credit_edges, []

    def credit(batch, *rest):
        alive.append(graphs_of(batch.tree))
        if len(alive) == 1:
            raise torch.OutOfMemoryError(SAID)
        return real(batch, *rest)

    run.credit_edges = credit
    run.run()
    assert alive[0] > 0
    assert set(alive[1:]) == {0}
    assert run.kept_graphs.steps == 0


def test_a_tree_that_changes_over_a_run_needs_room_for_the_most_that_it_will_have():
    written = {
        "model": {"path": "shapes", "call": {"num_inference_steps": 20}},
        "rewards": [{"use": "shapes"}],
        "algorithm": {"preset": "branch_grpo_mix"},
        "train": {"groups": 2, "group_size": 16, "iterations": 301, "updates": 1},
    }
    settings = config.validate(written)
    every = [predict_cost(settings, 20, iteration).graphs for iteration in range(0, 301, 25)]
    assert most_graphs(settings, 20).graphs == max(every) > 2 * every[0]


def test_cuda_graphs_are_given_up_after_kept_ones(tmp_path):
    run = begun(tmp_path)
    run.run()
    given, kept = [], run.kept_graphs
    kept.captured = SimpleNamespace(give_up=lambda why: given.append(why) or len(given) == 1)
    assert "train.replay" in kept.give_up()
    assert not given
    assert kept.give_up() == "the memory of model.cuda_graphs is freed"
    assert kept.give_up() is None
