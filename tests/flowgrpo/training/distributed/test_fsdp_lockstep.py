"""Processes that call networks in shards in lock-step, however unequal their work is."""

import pytest
import torch
from in_shards import broken_stand_ins, failing, rows, unequal_calls, unequal_references, unequal_updates, whole
from in_turn import each_in_turn
from pair import pair

from flowgrpo.training.distributed.fsdp_lockstep import Lockstep
from flowgrpo.training.run.stop_reasons import GONE


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    functions = (unequal_calls, unequal_updates, unequal_references, broken_stand_ins)
    return each_in_turn({function.__name__: function for function in functions}, tmp_path_factory.mktemp("two"))


def gradient(seed, loss):
    """Of the adapter of a network, by its process alone."""
    alone = whole(seed)
    loss(alone).sum().backward()
    return alone[3].scale.grad


def test_calls_of_unequal_order_and_number_are_right(answers):
    plain = [whole(seed) for seed in (1, 2)]
    (zero, none, calls_of_zero), (one, again, calls_of_one) = answers["unequal_calls"]
    wanted = [network(rows(rank)).detach() for rank, network in ((0, plain[0]), (1, plain[1]), (1, plain[0]))]
    assert all(torch.equal(each, wanted[0]) for each in zero)
    assert torch.equal(one[0], wanted[1])
    assert torch.equal(one[1], wanted[2])
    assert (none, len(again)) == ([], 2)
    assert (calls_of_zero, calls_of_one) == (3, 4)


def test_gradients_of_unequal_updates_are_each_process_s_own(answers):
    zero, one = answers["unequal_updates"]
    assert torch.equal(one[0], gradient(1, lambda alone: alone(rows(1))))
    assert one[1] is None  # what it only stood in for leaves no gradient
    assert torch.equal(zero[0], gradient(1, lambda alone: alone(rows(0)) + alone(2 * rows(0))))
    assert zero[1].isfinite().all()
    assert zero[1].abs().sum() > 0


def test_who_computes_a_reference_stands_in_with_its_adapters_afterwards(answers):
    (none, of_second), (of_first, nothing) = answers["unequal_references"]
    assert none is nothing is None
    assert torch.equal(of_first, gradient(1, lambda alone: alone(rows(1))))
    assert torch.equal(of_second, gradient(2, lambda alone: alone(rows(0))))


def test_what_a_stand_in_computes_reaches_no_gradient(answers):
    for rank, found in enumerate(answers["broken_stand_ins"]):
        alone = whole(1)
        for _ in range(1 + rank):
            alone(rows(rank)).sum().backward()
        assert torch.equal(found, alone[3].scale.grad)


def test_without_shards_nothing_is_waited_for():
    lockstep, x = Lockstep(), torch.ones(2, requires_grad=True)
    lockstep.join()
    lockstep.backward((2 * x).sum())
    assert not lockstep.active
    assert x.grad.tolist() == [2, 2]


def test_who_waits_for_a_process_that_fails_is_told(tmp_path):
    waiting, failed = pair(failing, tmp_path)
    assert failed == "ValueError: no more"
    assert any(words in waiting for words in GONE)
