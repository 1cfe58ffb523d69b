"""Seeds of samples that an engine draws."""

from flowgrpo_engine import asking


def test_seeds_differ_by_group_iteration_and_run_and_are_the_same_again():
    found = {asking.seed_of(*address) for address in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]}
    assert len(found) == 4
    assert all(0 <= seed < 2**48 for seed in found)
    assert asking.seed_of(0, 0, 0) in found
