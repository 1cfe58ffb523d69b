import pytest
import torch

from flowgrpo.mdlm.methods.objectives.aggregation import AGGREGATIONS

SCORED = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]).bool()
ADVANTAGE = torch.tensor([1.0, -1.0, -2.0])
STEP = torch.tensor([[0, 0, 3, 3], [2, 0, 0, 0], [1, 1, 1, 5]])


@pytest.mark.parametrize(
    ("name", "advantage", "expected"),
    [
        ("token_mean", ADVANTAGE, [[1 / 8] * 3 + [0], [1 / 8, 0, 0, 0], [1 / 8] * 4]),
        ("sequence_mean", ADVANTAGE, [[1 / 9] * 3 + [0], [1 / 3, 0, 0, 0], [1 / 12] * 4]),
        ("step_mean", ADVANTAGE, [[1 / 10, 1 / 10, 1 / 5, 0], [1 / 5, 0, 0, 0], [1 / 15] * 3 + [1 / 5]]),
        ("fixed_length", ADVANTAGE, [[1 / 12] * 3 + [0], [1 / 12, 0, 0, 0], [1 / 12] * 4]),
        # JustGRPO's scale, 1 / (length x answers of A != 0), on its own example of two in three
        ("fixed_length", torch.tensor([1.0, 0.0, -1.0]), [[1 / 8] * 3 + [0], [1 / 8, 0, 0, 0], [1 / 8] * 4]),
        ("balanced", ADVANTAGE, [[1 / 6] * 3 + [0], [1 / 10, 0, 0, 0], [1 / 10] * 4]),
        # one side has all where the other is empty
        ("balanced", torch.tensor([1.0, 0.0, 2.0]), [[1 / 7] * 3 + [0], [0] * 4, [1 / 7] * 4]),
        ("balanced", torch.zeros(3), [[0.0] * 4] * 3),
    ],
)
def test_weights_by_hand(name, advantage, expected):
    torch.testing.assert_close(AGGREGATIONS[name](SCORED, advantage, STEP), torch.tensor(expected))


def test_weights_of_a_fixed_length_are_finite_where_no_answer_counts():
    assert AGGREGATIONS["fixed_length"](SCORED, torch.zeros(3), STEP).isfinite().all()


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
