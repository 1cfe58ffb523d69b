import pytest
import torch

from flowgrpo.mdlm.methods.objectives.aggregation import AGGREGATIONS

SCORED = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]).bool()
ADVANTAGE = torch.tensor([1.0, -1.0, -2.0])
STEP = torch.tensor([[0, 0, 3, 3], [2, 0, 0, 0], [1, 1, 1, 5]])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_mean", [[1 / 8] * 3 + [0], [1 / 8, 0, 0, 0], [1 / 8] * 4]),
        ("sequence_mean", [[1 / 9] * 3 + [0], [1 / 3, 0, 0, 0], [1 / 12] * 4]),
        ("step_mean", [[1 / 10, 1 / 10, 1 / 5, 0], [1 / 5, 0, 0, 0], [1 / 15] * 3 + [1 / 5]]),
        ("fixed_length", [[1 / 12] * 3 + [0], [1 / 12, 0, 0, 0], [1 / 12] * 4]),
        ("balanced", [[1 / 6] * 3 + [0], [1 / 10, 0, 0, 0], [1 / 10] * 4]),
    ],
)
def test_weights_by_hand(name, expected):
    weights = AGGREGATIONS[name](SCORED, ADVANTAGE, STEP)
    torch.testing.assert_close(weights, torch.tensor(expected))


def test_answers_of_no_advantage_do_not_count_for_a_fixed_length():
    """JustGRPO's scale, 1 / (length x answers of A != 0), on its own example of two in three."""
    weights = AGGREGATIONS["fixed_length"](SCORED, torch.tensor([1.0, 0.0, -1.0]), STEP)
    torch.testing.assert_close(weights, SCORED / (2 * 4))
    assert AGGREGATIONS["fixed_length"](SCORED, torch.zeros(3), STEP).isfinite().all()


def test_one_side_has_all_the_weight_where_the_other_is_empty():
    weights = AGGREGATIONS["balanced"](SCORED, torch.tensor([1.0, 0.0, 2.0]), STEP)
    torch.testing.assert_close(weights, torch.tensor([[1 / 7] * 3 + [0], [0] * 4, [1 / 7] * 4]))
    assert (AGGREGATIONS["balanced"](SCORED, torch.zeros(3), STEP) == 0).all()


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean", "step_mean", "fixed_length"])
def test_two_processes_weigh_as_one(name):
    """The sum over processes is faked: of a row twice, each process sees one copy."""
    together = AGGREGATIONS[name](SCORED.repeat(2, 1), ADVANTAGE.repeat(2), STEP.repeat(2, 1))
    apart = AGGREGATIONS[name](SCORED, ADVANTAGE, STEP, reduce=lambda total: 2 * total)
    torch.testing.assert_close(together, apart.repeat(2, 1))


def test_two_processes_balance_as_one():
    """Good answers on one process, bad ones on the other: each gives half, if either asks both."""
    whole = AGGREGATIONS["balanced"](SCORED, ADVANTAGE, STEP)
    sums = iter([torch.tensor(3.0), torch.tensor(5.0), torch.tensor(2.0)])
    first = AGGREGATIONS["balanced"](SCORED[:1], ADVANTAGE[:1], STEP[:1], reduce=lambda total: next(sums))
    torch.testing.assert_close(first, whole[:1])
