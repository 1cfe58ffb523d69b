"""Roots are dealt to the processes, not groups: few groups on many processes give the numbers of one."""

import pytest
import torch
from pair import pair
from shared_groups import CASES, runs

EXACT = ("reward/mean", "reward/std", "reward/lost", "groups/teaching", "groups/zero_std_fraction")
DRAFT = {"draft/rank_agreement", "draft/halves_kept"}
COUNTS = ("cost/model_evaluations", "cost/trained_edges", "cost/decoded", "policy/updates")


@pytest.fixture(scope="module")
def by_processes(tmp_path_factory):
    found = {count: pair(runs, tmp_path_factory.mktemp(str(count)), processes=count) for count in (1, 2, 4)}
    assert not [rank for ranks in found.values() for rank in ranks if isinstance(rank, str)]
    return found


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_one_group_on_several_processes_gives_the_numbers_of_one(by_processes, case, processes):
    ((of_one, weights),) = (rank[case] for rank in by_processes[1])
    assert of_one[-1]["policy/grad_norm"] > 0
    for rank, found in enumerate(by_processes[processes]):
        told, own = found[case]
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
