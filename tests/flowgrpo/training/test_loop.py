"""The order of an iteration."""

from field import trainer

from flowgrpo import config


def test_the_loop_takes_the_steps_of_a_kind_in_their_order(tmp_path):
    """Evaluated at the start and after every second iteration, with a checkpoint after each."""
    chosen = config.validated(
        {
            "model": {"path": "field", "lora": None},
            "algorithm": {"preset": "flow_grpo"},
            "train": {"iterations": 2, "groups": 2, "group_size": 2, "updates": 1},
            "eval": {"every": 2, "prompts": 2, "save": 0},
            "run": {"name": "r", "dir": str(tmp_path), "checkpoint": {"every": 1}},
        }
    )
    run = trainer(chosen)
    taken = []

    def told(name):
        step = getattr(run, name)
        return lambda *arguments: taken.append(name) or step(*arguments)

    for name in (
        "on_start",
        "rollout",
        "units",
        "advantages",
        "update",
        "on_updated",
        "eval_samples",
        "save_checkpoint",
    ):
        setattr(run, name, told(name))
    run.run()
    iteration = ["rollout", "units", "advantages", "update", "on_updated"]
    assert taken == [
        "on_start",
        "eval_samples",
        *iteration,
        "save_checkpoint",
        *iteration,
        "eval_samples",
        "save_checkpoint",
    ]
