"""Processes that only roll out for others give the numbers of a run without them."""

import re
from functools import cache, partial

import ahead
import pytest
import torch
from in_turn import each_in_turn
from pair import pair

from flowgrpo import config
from flowgrpo.errors import InputError
from flowgrpo.schema.sections import Run
from flowgrpo.training.distributed import worker_roles
from flowgrpo.training.distributed.worker_roles import Roles
from flowgrpo.training.planning import gpu_scaling

AT_ONCE = ("chains", "an average and a reference that follows")
FURTHER = tuple(case for case in ahead.CASES if case not in AT_ONCE)
CASES = [
    *[(case, staleness) for staleness, cases in ((0, AT_ONCE), (2, ahead.CASES)) for case in cases],
    *[pytest.param((case, 0), marks=pytest.mark.zoo) for case in FURTHER],
]


def without_staleness(cases, generators):
    return partial(ahead.runs, generators=generators, cases=cases, lags=(0,))


def late(generators):
    return partial(ahead.runs, generators=generators, lags=(2,))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    functions = {"late": late(0), "at once": without_staleness(AT_ONCE, 0)}
    found = each_in_turn(functions, tmp_path_factory.mktemp("alone"), processes=1)
    return found["late"][0] | found["at once"][0]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """What two processes find; the last function ends in an error."""
    functions = (ahead.chains, ahead.interrupted, ahead.posted, ahead.unreadable)
    named = {function.__name__: function for function in functions}
    beside = {"late": late(1), "at once": without_staleness(AT_ONCE, 1)}
    return each_in_turn(beside | named, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def pairs(alone, of_two, tmp_path_factory):
    """Gives what a run of a case told alone, and what it told beside a generator."""

    @cache
    def further():
        one, beside = (
            pair(without_staleness(FURTHER, count - 1), tmp_path_factory.mktemp("further"), processes=count)[0]
            for count in (1, 2)
        )
        return one, beside

    def of(case):
        usual = alone, of_two["late"][0] | of_two["at once"][0]
        one, beside = usual if case in alone else further()
        return one[case], beside[case]

    return of


@pytest.fixture(scope="module")
def of_three(tmp_path_factory):
    functions = {"with_one": ahead.chains_with_one, "with_two": ahead.chains_with_two}
    return each_in_turn(functions, tmp_path_factory.mktemp("three"), processes=3)


@pytest.mark.parametrize("case", CASES)
def test_a_generator_and_a_process_that_trains_give_the_weights_of_one_to_the_bit(pairs, case):
    (lines, weights), (told, own) = pairs(case)
    assert told == lines
    assert all(torch.equal(own[name], tensor) for name, tensor in weights.items())
    drifts = [line["policy/max_abs_log_ratio"] for line in told]
    assert (max(drifts) > 0) == (case[1] > 0)


@pytest.mark.parametrize(("name", "trainers"), [("with_one", 2), ("with_two", 1)])
def test_generators_are_fewer_or_more_than_those_that_train(alone, of_two, of_three, name, trainers):
    """One makes the samples of two; two take turns for one."""
    apart = of_two["chains"] if trainers == 2 else [alone]
    for (lines, weights), (told, own) in zip(
        (each["chains", 2] for each in apart), (each["chains", 2] for each in of_three[name]), strict=False
    ):
        assert told == lines
        assert all(torch.equal(own[name], tensor) for name, tensor in weights.items())


def test_a_run_that_stops_and_goes_on_is_the_one_that_did_not(of_two, alone):
    """Both processes are told to stop, when what was made ahead has been thrown away."""
    trained, generated = of_two["interrupted"]
    assert not isinstance(trained, str), trained
    assert not isinstance(generated, str), generated
    (said, (told, own)), (of_generator, _) = trained, generated
    assert said == of_generator == "interrupted after step 2"
    lines, weights = alone["chains", 2]
    assert told == lines
    assert all(torch.equal(own[name], tensor) for name, tensor in weights.items())


def test_a_generator_that_ends_costs_no_more_than_what_it_was_making(tmp_path, alone):
    (told, own), generator = pair(ahead.lost, tmp_path)
    assert generator is None
    lines, weights = alone["chains", 2]
    assert told == lines
    assert all(torch.equal(own[name], tensor) for name, tensor in weights.items())


def test_what_was_posted_is_forgotten_once_it_must_have_been_received(of_two):
    kept, received = of_two["posted"]
    assert received == list(range(6))
    assert kept == [1, 2, 2, 2, 2, 2]


def test_a_message_that_cannot_be_read_is_no_process_that_has_ended(of_two):
    said, _ = of_two["unreadable"]
    assert said.startswith("OutOfMemory: out of memory in the rollout phase")


@pytest.mark.parametrize(
    ("generators", "staleness", "processes", "said"),
    [
        (2, 0, 2, "run.generators: 2 of 2 processes leave none that trains, take 1"),
        (
            2,
            0,
            5,
            "2 that generate for 3 that train cannot be shared out evenly, of 5 processes take 1 or 4",
        ),
        (
            2,
            1,
            3,
            "run.staleness: 2 generators for each process that trains work on 2 iterations at once, take 2 or more",
        ),
        (1, 0, 1, "run.generators: 1 of 1 process leave none that trains, take more run.processes"),
    ],
)
def test_roles_that_cannot_be_shared_out_are_refused(generators, staleness, processes, said):
    with pytest.raises(InputError, match=re.escape(said)):
        worker_roles.check(Run(generators=generators, staleness=staleness), processes)


def test_a_generator_has_whole_networks():
    with pytest.raises(InputError, match="a generator has whole networks, set run.sharding=none"):
        worker_roles.check(Run(generators=1, sharding="fsdp2"), 2)
    with pytest.raises(InputError, match="set run.context_parallel=1"):
        worker_roles.check(Run(generators=1, context_parallel=2), 3)


@pytest.mark.parametrize(("trainers", "generators"), [(1, 1), (4, 2), (2, 4), (3, 3), (1, 5)])
def test_each_trainer_is_served_by_one_generator_in_every_iteration(trainers, generators):
    found = Roles(trainers, generators)
    ranks = range(trainers, trainers + generators)
    assert [found.generates(rank) for rank in range(trainers + generators)] == [False] * trainers + [True] * generators
    for iteration in range(6):
        served = [trainer for rank in ranks for trainer in found.trainers_served(rank, iteration)]
        assert sorted(served) == list(range(trainers))
        for trainer in range(trainers):
            assert trainer in found.trainers_served(found.generator_for(trainer, iteration), iteration)
    assert sorted({trainer for rank in ranks for trainer in found.ever_served(rank)}) == list(range(trainers))


@pytest.mark.parametrize(
    ("key", "said"), [("context_parallel", "calls that processes share"), ("generators", "rollouts ahead")]
)
def test_seconds_that_nobody_knows_are_not_planned(key, said):
    """Neither how processes wait for each other in a call, nor which half of an iteration is the longer."""
    chosen = config.validate({"model": {"path": "shapes"}, "train": {"groups": 8}})
    chosen = chosen.model_copy(update={"run": chosen.run.model_copy(update={key: 2})})
    with pytest.raises(InputError, match=rf"--gpus: the seconds of {said} are not known, set run.{key}="):
        gpu_scaling.check_machines(chosen, 8)


def test_roles_of_texts_are_refused_before_anything_is_loaded():
    written = {"kind": "mdlm", "model": {"path": "digits"}, "rewards": ["solved"], "train": {"groups": 8}}
    with pytest.raises(InputError, match="leave none that trains, take 1"):
        config.validate(written | {"run": {"processes": 2, "generators": 2}})
