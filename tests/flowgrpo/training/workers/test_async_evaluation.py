"""Processes that only evaluate give the numbers of a run that evaluates itself."""

import re

import beside
import pytest
import torch
from in_turn import each_in_turn
from pair import pair

from flowgrpo import config
from flowgrpo.errors import InputError
from flowgrpo.schema.sections import Run
from flowgrpo.training.distributed import worker_roles
from flowgrpo.training.distributed.worker_roles import Roles


def found_by(folder, processes, *functions):
    return each_in_turn({function.__name__: function for function in functions}, folder, processes=processes)


@pytest.fixture(scope="module")
def of_one(tmp_path_factory):
    return found_by(tmp_path_factory.mktemp("one"), 1, beside.alone, beside.behind)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    functions = (beside.with_one, beside.alone, beside.slow, beside.interrupted)
    return found_by(tmp_path_factory.mktemp("two"), 2, *functions)


@pytest.fixture(scope="module")
def of_three(tmp_path_factory):
    return found_by(tmp_path_factory.mktemp("three"), 3, beside.with_one, beside.with_two, beside.with_a_generator)


@pytest.fixture
def alone(of_one):
    return of_one["alone"][0]


def assert_same(found, expected, same=torch.equal):
    """Lines and weights to the bit; samples, too, where calls have as many rows."""
    assert not isinstance(found, str), found
    assert found[0] == expected[0]
    for own, others in zip(found[1], expected[1], strict=True):
        assert own == pytest.approx(others)
    assert found[2].keys() == expected[2].keys()
    assert all(torch.equal(found[2][name], tensor) for name, tensor in expected[2].items())
    assert found[3].keys() == expected[3].keys() == {f"samples-{step}" for step in (0, 2, 4, 5)}
    for step, samples in expected[3].items():
        assert all(map(same, found[3][step], samples))


def test_an_evaluator_gives_the_lines_weights_and_samples_of_a_run_without_it(of_two, alone):
    found, _ = of_two["with_one"]
    assert_same(found, alone)
    assert found[1] == alone[1]


def test_evaluators_deal_the_prompts_among_themselves(of_three, alone):
    assert_same(of_three["with_two"][0], alone, same=torch.allclose)


def test_evaluators_stand_beside_generators(of_one, of_three):
    assert_same(of_three["with_a_generator"][0], of_one["behind"][0])


def test_several_processes_train_beside_an_evaluator(of_two, of_three):
    apart, found = of_two["alone"], of_three["with_one"]
    assert_same(found[0], apart[0], same=torch.allclose)
    assert found[1][0] == apart[1][0]


def test_iterations_do_not_wait_for_an_evaluation(of_two):
    told, _ = of_two["slow"]
    assert not isinstance(told, str), told
    assert told[0] == ("train", 1)
    assert [each for each in told if each[0] == "eval"] == [("eval", step) for step in (0, 2, 4, 5)]


def test_a_run_that_stops_and_goes_on_is_the_one_that_did_not(of_two, alone):
    trained, evaluated = of_two["interrupted"]
    assert not isinstance(trained, str), trained
    assert not isinstance(evaluated, str), evaluated
    assert trained[0] == evaluated[0] == "interrupted after step 3"
    assert_same(trained[1], alone)


def test_an_evaluator_that_ends_stops_the_run(tmp_path):
    found, evaluator = pair(beside.lost, tmp_path)
    assert evaluator is None
    name, said, rest = found
    assert name == "Lost"
    assert said.startswith("stopped, process 1, which evaluated, has ended (")
    assert re.fullmatch(r"a checkpoint is written, go on|go on from step \d, the last that was sound,", rest)


@pytest.mark.parametrize(
    ("choices", "processes", "said"),
    [
        ({"evaluators": 2}, 2, "run.evaluators: 2 of 2 processes leave none that trains, take fewer, or more run.proc"),
        ({"evaluators": 1, "generators": 1}, 2, "run.evaluators: 1 of 2 processes leave none that trains, take fewer"),
        ({"evaluators": 1, "sharding": "fsdp2"}, 2, "an evaluator has whole networks, set run.sharding=none"),
        ({"evaluators": 1, "context_parallel": 2}, 3, "an evaluator calls a network alone, set run.context_parallel=1"),
        (
            {"evaluators": 1, "generators": 2},
            6,
            "2 that generate for 3 that train cannot be shared out evenly, of 5 pro",
        ),
    ],
)
def test_roles_that_cannot_be_are_refused(choices, processes, said):
    with pytest.raises(InputError, match=re.escape(said)):
        worker_roles.check(Run(**choices), processes)


def test_roles_stand_in_their_order():
    found = Roles(trainers=2, generators=1, evaluators=2)
    assert [found.generates(rank) for rank in range(5)] == [False, False, True, False, False]
    assert [found.evaluates(rank) for rank in range(5)] == [False, False, False, True, True]
    assert [found.samples_held_out(rank) for rank in range(5)] == [False, False, False, True, True]
    assert [Roles(2, 1).samples_held_out(rank) for rank in range(3)] == [True, True, False]


def test_groups_are_dealt_to_those_that_train():
    written = {"kind": "mdlm", "model": {"path": "digits"}, "rewards": ["solved"], "train": {"groups": 4}}
    assert config.validate(written | {"run": {"processes": 5, "evaluators": 1}}).run.shards == 4
