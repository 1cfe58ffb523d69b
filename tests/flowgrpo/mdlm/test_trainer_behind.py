"""Answers that an older policy made are compared with that one."""

from flowgrpo.commands.runs import train as run


def test_the_ratio_of_one_step_is_to_the_policy_that_made_the_answers(settings):
    """A single step on answers of the present policy has no old likelihood; of an older one it has."""
    choices = {"algorithm__preset": "diffu_grpo", "train__updates": 1, "train__iterations": 3}
    of_now = run.train_config(settings(run__name="now", **choices))
    assert [line["policy/max_abs_log_ratio"] for line in of_now.metrics if line["phase"] == "train"] == [None] * 3
    behind = run.train_config(settings(run__name="behind", run__staleness=1, **choices))
    first, *rest = [line["policy/max_abs_log_ratio"] for line in behind.metrics if line["phase"] == "train"]
    assert first is None
    assert all(0 < drift < 1 for drift in rest)
