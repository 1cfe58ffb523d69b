"""Sizes that a run finds: it has the numbers of one with these written out, keeps them, and halves them if it must."""

import json
from functools import partial

import pytest
import torch
from field import lines, weights_of
from in_batches import AUTO, SAID, Short, begun, beside_an_evaluator, counting, of_two, of_two_short_later, told
from pair import pair

from flowgrpo.errors import InputError
from flowgrpo.training import batch_sizes, probing
from flowgrpo.training.out_of_memory import OutOfMemory
from rewards import Reward


@pytest.fixture(autouse=True)
def a_clock_that_only_counts(monkeypatch):
    monkeypatch.setattr(probing, "clock", counting())


@pytest.fixture
def no_probe(monkeypatch):
    """A function after which nothing may be probed."""

    def forbid():
        monkeypatch.setattr(probing.Prober, "fits", lambda *arguments: pytest.fail("it probes"))

    return forbid


def interrupt():
    raise KeyboardInterrupt


def short(with_gradient=1000, without=1000):
    net = Short()
    net.with_gradient, net.without = with_gradient, without
    return net


def few(algorithm):
    """Draws that a short schedule has."""
    return {"algorithm__likelihood__draws": 3} if algorithm in ("awm", "dgpo") else {}


def held(run):
    written = json.loads((run.folder / "batches.json").read_text())["held"]
    return [(each["step"], each.get("micro_batch"), each.get("rollout_batch"), each["why"]) for each in written]


def equal(some, others):
    assert some[:2] == others[:2]
    assert all(torch.equal(tensor, others[2][name]) for name, tensor in some[2].items())


def at(run, iteration, change):
    """Let something change when an iteration begins to roll out, in a run that goes on from wherever."""
    real = run.rollout

    def rollout(number, groups):
        if number == iteration:
            change()
        return real(number, groups)

    run.rollout = rollout


@pytest.mark.parametrize("algorithm", ["flow_grpo", "tempflow", "awm", "seppo"])
@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (AUTO, {"train__micro_batch": 4, "train__rollout_batch": 8}),
        ({"train__micro_batch": "auto"}, {"train__micro_batch": 4}),
        (
            {"train__micro_batch": 3, "train__rollout_batch": "auto"},
            {"train__micro_batch": 3, "train__rollout_batch": 8},
        ),
    ],
)
def test_a_run_has_the_numbers_of_one_with_the_found_sizes_written_out(tmp_path, algorithm, asked, found):
    options = {"algorithm__preset": algorithm, "train__iterations": 3, **few(algorithm)}
    run = begun(tmp_path / "auto", short(4, 8), **options, **asked)
    run.run()
    assert (run.config.train.micro_batch, run.config.train.rollout_batch) == (
        found["train__micro_batch"],
        found.get("train__rollout_batch"),
    )
    written = begun(tmp_path / "written", short(4, 8), **options, **found)
    written.run()
    equal(told(run), told(written))


def test_what_was_found_is_in_the_folder_beside_the_word(tmp_path):
    run = begun(tmp_path, short(4, 8), **AUTO, train__iterations=1)
    run.run()
    written = json.loads((run.folder / "batches.json").read_text())
    assert written["asked"] == {"micro_batch": "auto", "rollout_batch": "auto"}
    assert written["held"] == [{"step": 0, "micro_batch": 4, "rollout_batch": 8, "why": "found"}]
    assert {key: [each["rows"] for each in tried] for key, tried in written["tried"].items()} == {
        "micro_batch": [1, 2, 4],
        "rollout_batch": [1, 2, 4, 8],
    }
    chosen = batch_sizes.settled(begun(tmp_path / "other", **AUTO).config, run.folder)
    assert (chosen.train.micro_batch, chosen.train.rollout_batch) == (4, 8)


def test_a_probe_leaves_no_trace(tmp_path):
    run = begun(tmp_path, short(4, 8), **AUTO)
    torch.manual_seed(3)
    state, weights = torch.get_rng_state(), weights_of(run)
    with run.report:
        run.batch_sizes.prepare()
    assert torch.equal(torch.get_rng_state(), state)
    assert run.evaluations == 0
    assert all(p.grad is None for p in run.weights.parameters)
    assert not run.optimizer.state
    assert all(torch.equal(tensor, weights[name]) for name, tensor in weights_of(run).items())
    assert run.report.lines == []


def test_a_resume_takes_what_was_found_without_a_probe(tmp_path, no_probe):
    whole = begun(tmp_path / "whole", short(4, 8), **AUTO, eval__every=3)
    whole.run()
    begun(tmp_path / "half", short(4, 8), **AUTO, eval__every=3, train__iterations=3).run()
    no_probe()
    rest = begun(tmp_path / "half", short(), **AUTO, eval__every=3)
    rest.resume()
    rest.run()
    equal(told(rest), told(whole))


def test_a_run_that_was_killed_before_its_first_checkpoint_does_not_probe_again(tmp_path, no_probe):
    killed = begun(tmp_path, short(4, 8), **AUTO, run__checkpoint__every=3)
    at(killed, 1, interrupt)
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    no_probe()
    again = begun(tmp_path, short(), **AUTO, run__checkpoint__every=3)
    again.resume()
    assert again.done == 0
    again.run()
    whole = begun(tmp_path / "whole", train__micro_batch=4, train__rollout_batch=8, run__checkpoint__every=3)
    whole.run()
    equal(told(again), told(whole))


def test_a_number_in_the_place_of_the_word_is_taken_by_a_resume(tmp_path, no_probe):
    begun(tmp_path, short(4, 8), **AUTO, train__iterations=1).run()
    no_probe()
    rest = begun(tmp_path, train__micro_batch=5, train__rollout_batch="auto", train__iterations=2)
    rest.resume()
    rest.run()
    assert (rest.config.train.micro_batch, rest.config.train.rollout_batch) == (5, 8)


def said(run):
    return [line.partition(" step ")[2] for line in (run.folder / "log.txt").read_text().splitlines()]


def test_graphs_rest_where_a_rollout_has_to_have_smaller_calls(tmp_path):
    """From then on the update has other calls than the rollout, and gathers its rows anew."""
    net = short()
    run = begun(tmp_path, net, **AUTO, algorithm__objective__kl__beta=0.0, train__replay="auto", train__iterations=4)
    at(run, 2, lambda: setattr(net, "without", 6))
    run.run()
    assert [each[2] for each in held(run)] == [16, 8, 4]
    spared = [line["cost/update_evaluations"] for line in lines(run)]
    assert spared[0] == spared[1] < spared[2] == spared[3]
    assert all(line["policy/max_abs_log_ratio"] <= 1e-6 for line in lines(run))


def test_a_rollout_without_memory_is_made_again_in_smaller_calls(tmp_path):
    net = short()
    plain_loss = {"algorithm__objective__kl__beta": 0.0}  # or the update asks the reference without a gradient
    run = begun(tmp_path / "short", net, **AUTO, **plain_loss, train__iterations=4)
    at(run, 2, lambda: setattr(net, "without", 6))
    run.run()
    assert held(run) == [(0, 16, 16, "found"), (3, 16, 8, "out of memory"), (3, 16, 4, "out of memory")]
    end = "from here on, and what was under way is made again"
    assert said(run) == [
        f"3: out of memory in the rollout phase; train.rollout_batch is 8 {end}",
        f"3: out of memory in the rollout phase; train.rollout_batch is 4 {end}",
    ]
    plain = begun(tmp_path / "plain", **plain_loss, train__micro_batch=16, train__iterations=4)
    plain.run()
    costs = ("cost/model_evaluations", "cost/rollout_evaluations", "cost/decoded", "policy/updates")
    assert [[line[key] for key in costs] for line in lines(run)] == [
        [line[key] for key in costs] for line in lines(plain)
    ]
    for name, tensor in weights_of(plain).items():
        torch.testing.assert_close(weights_of(run)[name], tensor, rtol=1e-3, atol=1e-5)


def test_with_one_size_for_both_a_rollout_halves_that(tmp_path):
    net = short()
    run = begun(tmp_path, net, train__micro_batch="auto", train__iterations=2)
    at(run, 1, lambda: setattr(net, "without", 8))
    run.run()
    assert held(run) == [(0, 16, None, "found"), (2, 8, None, "out of memory")]
    assert [line["policy/max_abs_log_ratio"] for line in lines(run)] == [0, 0]


def in_the_second_part(run, change):
    """Let something change before the second optimizer step of the second iteration."""
    real = run._update_part

    def update_part(credited, part):
        if (run.done, part) == (1, 1):
            change()
        return real(credited, part)

    run._update_part = update_part


@pytest.mark.parametrize("algorithm", ["flow_grpo", "tempflow", "awm", "dgpo"])
def test_an_optimizer_step_without_memory_leaves_no_trace(tmp_path, algorithm):
    options = {"algorithm__preset": algorithm, "train__iterations": 3, **few(algorithm)}
    net, most = short(), 3 if algorithm == "tempflow" else 5  # of whose states six edges each leave
    run = begun(tmp_path / "short", net, **AUTO, **options)
    in_the_second_part(run, lambda: setattr(net, "with_gradient", most))
    run.run()
    assert held(run)[1:] == [(2, rows, 16, "out of memory") for rows in (8, 4, 2) if 2 * rows > most]
    plain = begun(tmp_path / "plain", train__micro_batch=16, **options)
    plain.run()
    costs = ("cost/update_evaluations", "cost/trained_edges", "policy/updates")
    assert [[line[key] for key in costs] for line in lines(run)] == [
        [line[key] for key in costs] for line in lines(plain)
    ]
    for name, tensor in weights_of(plain).items():
        torch.testing.assert_close(weights_of(run)[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("killed", [1, 2, 4])
def test_a_resume_is_the_run_that_ran_out_of_memory_and_was_not_killed(tmp_path, killed):
    """Bit for bit, whether it is killed before, in or after the iteration whose second step had too little."""

    def run_of(name, **options):
        net = short()
        run = begun(tmp_path / name, net, **AUTO, run__checkpoint__every=2, **options)
        real = run._update_part

        def update_part(credited, part):
            net.with_gradient = 5 if run.done > 1 or (run.done, part) == (1, 1) else 1000
            if run.done == dying and part == 1 and net.with_gradient == 5 and run.config.train.micro_batch == 4:
                raise KeyboardInterrupt
            return real(credited, part)

        run._update_part = update_part
        return run

    dying = None
    whole = run_of("whole")
    whole.run()
    assert held(whole)[-1] == (2, 4, 16, "out of memory")
    dying = {1: 1, 2: 3, 4: 5}[killed]
    with pytest.raises(KeyboardInterrupt):
        run_of("killed").run()
    dying = None
    rest = run_of("killed")
    rest.resume()
    rest.run()
    assert held(rest) == held(whole)
    equal(told(rest), told(whole))


def test_an_evaluation_and_a_decoding_are_made_again_too(tmp_path):
    net, most = short(), [1000]
    run = begun(tmp_path, net, **AUTO, train__iterations=2, eval__every=2)

    def decode(state):
        if len(state) > most[0]:
            raise torch.OutOfMemoryError(SAID)
        return state

    run.policy._decode = decode
    at(run, 1, lambda: most.__setitem__(0, 4))
    real = run.eval_samples

    def eval_samples():
        net.without = 1 if run.done == 2 else 1000
        return real()

    run.eval_samples = eval_samples
    run.run()
    assert held(run)[1:] == [
        (2, 16, 8, "out of memory"),
        (2, 16, 4, "out of memory"),
        (2, 16, 2, "out of memory"),
        (2, 16, 1, "out of memory"),
    ]
    assert len(lines(run, "eval")) == 2


def test_memory_that_runs_out_within_an_optimizer_step_ends_the_run(tmp_path):
    run = begun(tmp_path, **AUTO, train__iterations=2)

    def step(*arguments, **options):
        raise torch.OutOfMemoryError(SAID)

    run.optimizer.step = step
    with pytest.raises(OutOfMemory, match="out of memory in the update phase"):
        run.run()
    assert held(run) == [(0, 16, 16, "found")]


def test_what_a_reward_takes_is_not_helped_by_smaller_calls(tmp_path):
    run = begun(tmp_path, **AUTO, train__iterations=2)

    def hungry(samples, prompts):
        raise torch.OutOfMemoryError(SAID)

    at(run, 1, lambda: run.rewards.__setitem__(0, Reward("closeness", hungry)))
    with pytest.raises(OutOfMemory, match="out of memory in the rewards phase"):
        run.run()
    assert held(run) == [(0, 16, 16, "found")]


def test_one_row_that_runs_out_of_memory_ends_the_run(tmp_path):
    net = short()
    run = begun(tmp_path, net, **AUTO, train__iterations=2)
    at(run, 1, lambda: setattr(net, "without", 0))
    with pytest.raises(OutOfMemory, match="out of memory in the rollout phase"):
        run.run()
    assert held(run)[-1] == (2, 16, 1, "out of memory")


def test_a_size_that_was_written_is_never_changed(tmp_path):
    net = short()
    run = begun(tmp_path, net, train__micro_batch="auto", train__rollout_batch=8, train__iterations=2)
    at(run, 1, lambda: setattr(net, "without", 4))
    with pytest.raises(OutOfMemory, match="out of memory in the rollout phase"):
        run.run()


@pytest.mark.parametrize(("room", "then"), [(1000, 16), (5, 4)])
def test_on_another_machine_a_resume_tries_that_the_sizes_fit(tmp_path, room, then):
    begun(tmp_path, **AUTO, train__iterations=1).run()
    file = tmp_path / "r" / "batches.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps({**written, "machines": [["NVIDIA H200", 150 * 2**30]]}))
    rest = begun(tmp_path, short(room, 1000), **AUTO, train__iterations=2)
    rest.resume()
    rest.run()
    assert held(rest) == [(0, 16, 16, "found"), (1, then, 16, "another machine")]
    assert json.loads(file.read_text())["machines"] == written["machines"]
    warned = (tmp_path / "r" / "log.txt").read_text()
    sentence = "train.micro_batch was found on another machine; 16 do not fit here (cpu of "
    assert (sentence in warned) == (then < 16)
    assert ("it is 4 from here on" in warned) == (then < 16)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        '{"machines": [], "held": [{"step": 0, "micro_batch": 0}], "tried": {}}',
        '{"machines": 3, "held": [], "tried": {}}',
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, content):
    begun(tmp_path, **AUTO, train__iterations=1).run()
    (tmp_path / "r" / "batches.json").write_text(content)
    rest = begun(tmp_path, **AUTO, train__iterations=2)
    rest.resume()
    with pytest.raises(
        InputError, match=r"batches\.json is not what a run writes that finds its batches; take it away"
    ):
        rest.run()


def test_two_processes_take_what_both_hold(tmp_path):
    """Each has 12 of the 24 samples of a part; one has room for 2 of them in an update, and for 4 in a rollout."""
    (tmp_path / "pair").mkdir()
    first, second = pair(partial(of_two, folder=str(tmp_path), with_gradient=2, without=4), tmp_path / "pair")
    assert first[:2] == second[:2] == (2, 4)
    assert all(torch.equal(tensor, second[2][name]) for name, tensor in first[2].items())
    written = json.loads((tmp_path / "r" / "batches.json").read_text())
    assert written["held"] == [{"step": 0, "micro_batch": 2, "rollout_batch": 4, "why": "found"}]


def test_a_process_that_evaluates_tries_the_sizes_of_those_that_train(tmp_path):
    """Each of two trains on 12 of the 24 samples of a part, so that calls of 8 are the largest."""
    (tmp_path / "three").mkdir()
    found = pair(partial(beside_an_evaluator, folder=str(tmp_path)), tmp_path / "three", processes=3, seconds=20)
    assert found == [(8, 8)] * 3


def test_of_two_processes_one_without_memory_ends_in_one_sentence(tmp_path):
    (tmp_path / "pair").mkdir()
    first, second = pair(partial(of_two_short_later, folder=str(tmp_path)), tmp_path / "pair", seconds=10)
    assert second.startswith("OutOfMemory: out of memory in the rollout phase")
    assert isinstance(first, str)  # whatever it says, it ends when the other does, or when it has waited long enough
