"""Answers that an older policy made are compared with that one."""

from runs import metrics

from flowgrpo.commands.runs import train as run


def test_the_ratio_of_one_step_is_to_the_policy_that_made_the_answers(settings):
    """A single step on answers of the present policy has no old likelihood; of an older one it has."""
    choices = {"algorithm__preset": "diffu_grpo", "train__updates": 1, "train__iterations": 3}
    now, behind = (run.train_config(settings(run__name=f"by{lag}", run__staleness=lag, **choices)) for lag in (0, 1))
    assert [line["policy/max_abs_log_ratio"] for line in metrics(now.folder)] == [None] * 3
    first, *rest = [line["policy/max_abs_log_ratio"] for line in metrics(behind.folder)]
    assert first is None
    assert all(0 < drift < 1 for drift in rest)
