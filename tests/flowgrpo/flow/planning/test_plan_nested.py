"""What a run with nested comparisons will cost, on every tree, and which of them compare nothing."""

import pytest
from field import settings, trainer

from flowgrpo.errors import InputError
from flowgrpo.flow.planning.iteration_forecast import predict_cost

NESTED = {"credit": "nested", "baseline": "leave_one_out"}
ONE = {"train__iterations": 1, "train__groups": 2}


@pytest.mark.parametrize(
    "algorithm",
    [
        {"preset": "branch_grpo", "tree": {"prune": {"rule": "extremes"}}},
        {"preset": "branch_grpo_mix", "credit": {"name": "nested", "between": 1.0}},
        {"preset": "tempflow", "credit": {"name": "nested", "between": 1.0}},
        {"preset": "flow_grpo"},
        {"preset": "dense_grpo", "kernel": {"calibrate": None}},
    ],
    ids=lambda algorithm: algorithm["preset"],
)
def test_a_run_counts_what_was_predicted(tmp_path, algorithm):
    chosen = settings(tmp_path, algorithm={**NESTED, **algorithm}, train__group_size=12, **ONE)
    cost, run = predict_cost(chosen, 6), trainer(chosen, held_out=0)
    run.run()
    (line,) = run.report.lines
    assert line["cost/trained_edges"] == cost.trained_edges > 0
    assert line["cost/update_evaluations"] == cost.update - cost.graphs
    assert line["groups/teaching"] == 2
    assert line["policy/max_abs_log_ratio"] < 1e-5


def test_siblings_of_states_that_have_one_child_are_refused(tmp_path):
    siblings = {**NESTED, "credit": {"name": "nested", "group": 0}}
    with pytest.raises(InputError, match=r"^algorithm\.credit: every edge would be compared with itself alone"):
        predict_cost(settings(tmp_path, algorithm={"preset": "flow_grpo", **siblings}, **ONE), 6)
    brush = settings(tmp_path, algorithm={"preset": "tempflow", **siblings}, train__group_size=12, **ONE)
    assert predict_cost(brush, 6).trained_edges == 2 * 2 * 6 * 5
