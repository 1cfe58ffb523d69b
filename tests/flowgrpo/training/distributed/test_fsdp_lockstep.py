"""Processes that call networks in shards in lock-step, however unequal their work is."""

import torch
from in_shards import broken_stand_ins, failing, rows, unequal_calls, unequal_references, unequal_updates, whole
from pair import pair

from flowgrpo.training.distributed.fsdp_lockstep import Lockstep
from flowgrpo.training.run.stop_reasons import GONE


def test_calls_of_unequal_order_and_number_are_right(tmp_path):
    plain = [whole(seed) for seed in (1, 2)]
    (zero, none, calls_of_zero), (one, again, calls_of_one) = pair(unequal_calls, tmp_path)
    wanted = [network(rows(rank)).detach() for rank, network in ((0, plain[0]), (1, plain[1]), (1, plain[0]))]
    assert all(torch.equal(each, wanted[0]) for each in zero)
    assert torch.equal(one[0], wanted[1])
    assert torch.equal(one[1], wanted[2])
    assert (none, len(again)) == ([], 2)
    assert (calls_of_zero, calls_of_one) == (3, 4)


def test_gradients_of_unequal_updates_are_each_process_s_own(tmp_path):
    alone = whole(1)
    found = pair(unequal_updates, tmp_path)
    alone(rows(1)).sum().backward()
    assert torch.equal(found[1][0], alone[3].scale.grad)
    assert found[1][1] is None  # what it only stood in for leaves no gradient
    assert found[0][1].isfinite().all()
    alone.zero_grad()
    (alone(rows(0)) + alone(2 * rows(0))).sum().backward()
    assert torch.equal(found[0][0], alone[3].scale.grad)
    assert found[0][1].abs().sum() > 0


def test_who_computes_a_reference_stands_in_with_its_adapters_afterwards(tmp_path):
    (none, of_second), (of_first, nothing) = pair(unequal_references, tmp_path)
    assert none is None
    assert nothing is None
    for seed, rank, found in ((1, 1, of_first), (2, 0, of_second)):
        alone = whole(seed)
        alone(rows(rank)).sum().backward()
        assert torch.equal(found, alone[3].scale.grad)


def test_what_a_stand_in_computes_reaches_no_gradient(tmp_path):
    alone = whole(1)
    for rank, found in enumerate(pair(broken_stand_ins, tmp_path)):
        alone.zero_grad()
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
