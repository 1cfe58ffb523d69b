"""Which snapshots are kept and drawn, by the number of optimizer steps and an address alone."""

from collections import Counter

from flowgrpo.training.weights.old_policies import Bank


def test_the_latest_snapshots_are_kept_and_the_start_is_the_first():
    bank = Bank(every=30, keep=3)
    kept = {step: list(bank.numbers(step)) for step in (0, 29, 30, 59, 60, 89, 90, 299)}
    assert kept == {
        0: [0], 29: [0], 30: [0, 1], 59: [0, 1], 60: [0, 1, 2], 89: [0, 1, 2], 90: [1, 2, 3], 299: [7, 8, 9],
    }  # fmt: skip


def test_a_draw_is_that_of_its_address_and_all_snapshots_are_alike_likely():
    bank = Bank(every=30, keep=7)
    drawn = [bank.draw(300, 5, "bank", iteration) for iteration in range(1400)]
    assert drawn == [bank.draw(300, 5, "bank", iteration) for iteration in range(1400)]
    assert drawn != [bank.draw(300, 6, "bank", iteration) for iteration in range(1400)]
    counted = Counter(drawn)
    assert sorted(counted) == list(range(4, 11))
    assert all(abs(count - 200) < 5 * (200 * 6 / 7) ** 0.5 for count in counted.values())
