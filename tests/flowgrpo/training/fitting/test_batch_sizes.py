"""Sizes that a run finds: it has the numbers of one with these written out, keeps them, and halves them if it must."""

import json
import shutil
from functools import partial

import pytest
import torch
from field import weights_of
from in_batches import (
    AUTO,
    at,
    begun,
    beside_an_evaluator,
    equal,
    few,
    held,
    of_two,
    of_two_disks,
    short,
    told,
)
from pair import pair

from flowgrpo.errors import InputError
from flowgrpo.training.fitting import batch_probing, batch_sizes

pytestmark = pytest.mark.usefixtures("counting_clock")


@pytest.fixture
def no_probe(monkeypatch):
    """A function after which nothing may be probed."""

    def forbid():
        monkeypatch.setattr(batch_probing.Prober, "fits", lambda *arguments: pytest.fail("it probes"))

    return forbid


def interrupt():
    raise KeyboardInterrupt


BOTH = (AUTO, {"train__micro_batch": 4, "train__rollout_batch": 8})
ONE = [
    ({"train__micro_batch": "auto"}, {"train__micro_batch": 4}),
    ({"train__micro_batch": 3, "train__rollout_batch": "auto"}, {"train__micro_batch": 3, "train__rollout_batch": 8}),
]


@pytest.mark.parametrize(
    ("algorithm", "asked", "found"),
    [
        *[(algorithm, *BOTH) for algorithm in ("flow_grpo", "tempflow", "awm", "seppo")],
        *[("flow_grpo", *sizes) for sizes in ONE],
        *[
            pytest.param(algorithm, *sizes, marks=pytest.mark.zoo)
            for algorithm in ("tempflow", "awm", "seppo")
            for sizes in ONE
        ],
    ],
)
def test_a_run_has_the_numbers_of_one_with_the_found_sizes_written_out(tmp_path, algorithm, asked, found):
    options = {"algorithm__preset": algorithm, "train__iterations": 1, **few(algorithm)}
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
    chosen = batch_sizes.resolve_sizes(begun(tmp_path / "other", **AUTO).config, run.folder)
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
    options = {**AUTO, "eval__every": 1, "train__iterations": 2}
    whole = begun(tmp_path / "whole", short(4, 8), **options)
    whole.run()
    begun(tmp_path / "half", short(4, 8), **{**options, "train__iterations": 1}).run()
    no_probe()
    rest = begun(tmp_path / "half", short(), **options)
    rest.resume()
    rest.run()
    equal(told(rest), told(whole))


def test_a_run_that_was_killed_before_its_first_checkpoint_does_not_probe_again(tmp_path, no_probe):
    options = {"train__iterations": 2, "run__checkpoint__every": 2}
    killed = begun(tmp_path, short(4, 8), **AUTO, **options)
    at(killed, 1, interrupt)
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    no_probe()
    again = begun(tmp_path, short(), **AUTO, **options)
    again.resume()
    assert again.done == 0
    again.run()
    whole = begun(tmp_path / "whole", train__micro_batch=4, train__rollout_batch=8, **options)
    whole.run()
    equal(told(again), told(whole))


def test_sizes_of_what_a_resume_goes_back_before_are_forgotten(tmp_path, no_probe):
    run = begun(tmp_path, **AUTO, train__iterations=3)
    at(run, 2, lambda: run.batch_sizes.hold(3, {"rollout_batch": 8}, "out of memory"))
    run.run()
    assert [each[0] for each in held(run)] == [0, 3]
    shutil.rmtree(tmp_path / "r" / "checkpoints" / "step-000003")
    no_probe()
    rest = begun(tmp_path, **AUTO, train__iterations=3)
    rest.resume()
    with rest.report:
        rest.batch_sizes.prepare()
    assert rest.config.train.rollout_batch == 16
    assert held(rest) == [(0, 16, 16, "found")]


def test_a_number_in_the_place_of_the_word_is_taken_by_a_resume(tmp_path, no_probe):
    begun(tmp_path, short(4, 8), **AUTO, train__iterations=1).run()
    no_probe()
    rest = begun(tmp_path, train__micro_batch=5, train__rollout_batch="auto", train__iterations=2)
    rest.resume()
    rest.run()
    assert (rest.config.train.micro_batch, rest.config.train.rollout_batch) == (5, 8)


def test_a_resume_that_asks_for_another_size_finds_that_alone(tmp_path):
    begun(tmp_path, train__micro_batch="auto", train__rollout_batch=8, train__iterations=1).run()
    file = tmp_path / "r" / "batches.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps({**written, "held": [{**written["held"][0], "micro_batch": 2}]}))
    rest = begun(tmp_path, **AUTO, train__iterations=2)
    rest.resume()
    rest.run()
    assert held(rest) == [(0, 2, None, "found"), (1, 2, 16, "found")]


def test_what_was_found_for_another_machine_is_kept_when_the_rest_is_not(tmp_path, monkeypatch):
    begun(tmp_path, train__micro_batch="auto", train__rollout_batch=8, train__iterations=1).run()
    file = tmp_path / "r" / "batches.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "machines": [["NVIDIA H200", 150 * 2**30]]}))
    rest = begun(tmp_path, **AUTO, train__iterations=2)
    rest.resume()
    with monkeypatch.context() as patch:
        patch.setattr(batch_sizes.BatchSizes, "_found", lambda *_: interrupt())
        with pytest.raises(KeyboardInterrupt):
            rest.run()
    again = begun(tmp_path, **AUTO, train__iterations=2)
    again.resume()
    again.run()
    assert held(again) == [(0, 16, None, "found"), (1, 16, None, "another machine"), (1, 16, 16, "found")]


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
        InputError, match=r"batches\.json is not a file of batch sizes that a run wrote; remove it to find them again"
    ):
        rest.run()


def test_processes_do_as_the_first_one_s_disk_says(tmp_path):
    """One that does not see the run's folder would else try sizes while the other does not, and both would wait."""
    begun(tmp_path / "0", **AUTO, train__iterations=1).run()
    (tmp_path / "pair").mkdir()
    found = pair(partial(of_two_disks, folder=str(tmp_path)), tmp_path / "pair", seconds=20)
    assert found == [(16, 16)] * 2
    (tmp_path / "0" / "r" / "batches.json").write_text("[]")
    (tmp_path / "again").mkdir()
    for said in pair(partial(of_two_disks, folder=str(tmp_path)), tmp_path / "again", seconds=20):
        assert said.startswith("InputError: ")
        assert "remove it to find them again" in said


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
