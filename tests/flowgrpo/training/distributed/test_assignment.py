"""Roots are dealt to the processes, not groups: few groups on many processes give the numbers of one."""

from functools import cache, partial

import pytest
import torch
from pair import pair
from shared_groups import CASES, runs

EXACT = ("reward/mean", "reward/std", "reward/lost", "groups/teaching", "groups/zero_std_fraction")
DRAFT = {"draft/rank_agreement", "draft/halves_kept"}
BY_FOUR = ("a group of chains", "chosen among equals", "brushes", "groups of unequal sizes")
COUNTS = ("cost/model_evaluations", "cost/trained_edges", "cost/decoded", "policy/updates")
USUAL = {2: tuple(case for case in CASES if case not in BY_FOUR), 4: BY_FOUR}


@pytest.fixture(scope="module")
def found_by(tmp_path_factory):
    """Gives what each of some processes found for a case; what is usual is found at once."""

    @cache
    def found(processes, cases):
        of_ranks = pair(partial(runs, cases=cases), tmp_path_factory.mktemp("runs"), processes=processes)
        assert not [rank for rank in of_ranks if isinstance(rank, str)]
        return of_ranks

    def of(processes, case):
        usual = USUAL.get(processes, tuple(CASES))
        cases = usual if case in usual else tuple(each for each in CASES if each not in usual)
        return [rank[case] for rank in found(processes, cases)]

    return of


@pytest.mark.parametrize(
    ("case", "processes"),
    [
        pytest.param(case, processes, marks=[pytest.mark.zoo] * (case not in USUAL[processes]))
        for case in CASES
        for processes in USUAL
    ],
)
def test_one_group_on_several_processes_gives_the_numbers_of_one(found_by, case, processes):
    ((of_one, weights),) = found_by(1, case)
    assert of_one[-1]["policy/grad_norm"] > 0
    for rank, (told, own) in enumerate(found_by(processes, case)):
        for name, tensor in own.items():
            torch.testing.assert_close(tensor, weights[name], rtol=1e-4, atol=1e-6)
        for line, expected in zip(told, of_one, strict=True) if rank == 0 else ():
            assert {key: line[key] for key in COUNTS} == {key: expected[key] for key in COUNTS}
            drifts = line["policy/max_abs_log_ratio"], expected["policy/max_abs_log_ratio"]
            if case == "chosen among equals":  # whose rows the update gathers anew
                assert all(drift <= 1e-6 for drift in drifts)
            else:
                assert drifts in ((0.0, 0.0), (None, None))  # None where the old policy is another
            assert {key for key in line if key.startswith("draft/")} == (DRAFT if "draft" in case else set())
            for key in (*EXACT, *sorted(DRAFT & line.keys())):
                assert line[key] == pytest.approx(expected[key], abs=1e-6), key
