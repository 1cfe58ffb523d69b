"""The order of an iteration."""

from pathlib import Path

from field import trainer

from flowgrpo import config
from flowgrpo.training import loop


def test_the_loop_takes_the_steps_of_a_kind_in_their_order(tmp_path):
    """Evaluated at the start and after every second iteration, with a checkpoint after each."""
    chosen = config.validate(
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

    for name in ("start", "rollout", "units", "observe", "take_step", "after_update", "eval_samples", "save"):
        setattr(run, name, told(name))
    run.run()
    iteration = ["rollout", "units", "observe", "take_step", "after_update"]
    assert taken == ["start", "eval_samples", *iteration, "save", *iteration, "eval_samples", "save"]


def test_the_loop_is_read_without_opening_another_file():
    imports = [line for line in Path(loop.__file__).read_text().splitlines() if line.startswith("from flowgrpo")]
    assert len(imports) <= 12
