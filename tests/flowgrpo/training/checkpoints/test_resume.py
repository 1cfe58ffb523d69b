"""What a run's folder holds for a resume, and what `run.resume: auto` makes of it."""

import json

import pytest

from flowgrpo.errors import InputError
from flowgrpo.training.checkpoints import resume
from flowgrpo.training.run import run_folder


@pytest.mark.parametrize(
    ("there", "begun"),
    [
        (None, False),
        ([], False),
        ([".lock"], False),
        ([".lock", "start.safetensors", "config.yaml.partial"], False),
        ([".lock", "engine/adapter.safetensors"], False),
        (["config.yaml"], True),
        (["config.yaml", "checkpoints/step-000001/state.json"], True),
        (["holiday.png"], True),  # not of a run, which is for others to refuse
    ],
)
def test_auto_begins_where_nothing_is_and_goes_on_where_anything_is(tmp_path, there, begun):
    run = tmp_path / "t"
    for name in there or ():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).touch()
    if there == []:
        run.mkdir()
    assert resume.decide("auto", run) is begun
    assert (resume.decide(True, run), resume.decide(False, run)) == (True, False)
    assert run_folder.is_begun(run) == ("config.yaml" in (there or ()))


def lines(*steps):
    return [{"step": 0, "phase": "eval"}, *({"step": step, "phase": "train"} for step in steps)]


def told(run, *steps):
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines(*steps)))


@pytest.mark.parametrize("steps", [(1,), (1, 2, 3)])
def test_iterations_without_a_checkpoint_are_dropped_until_there_was_one(tmp_path, steps):
    checkpoints = tmp_path / "checkpoints"
    resume.mark_start(checkpoints)
    told(tmp_path, *steps)
    resume.check_checkpoints(tmp_path)
    resume.checkpoint_written(checkpoints)
    with pytest.raises(InputError) as raised:
        resume.check_checkpoints(tmp_path)
    assert str(raised.value) == (
        f"run.resume: {tmp_path}/metrics.jsonl tells of {steps[-1]} iterations, and no checkpoint is left in {checkpoints}; "
        "put a copy back, or begin again with another run.name"
    )
    told(tmp_path)  # of a run that was killed in its first iteration nothing is lost
    resume.check_checkpoints(tmp_path)


@pytest.mark.parametrize(
    ("step", "written", "sentence"),
    [
        (4, [], "run.resume: goes on from the checkpoint of step 4"),
        (5, [], "run.resume: all 5 iterations are done; train.iterations=10 goes on"),
        (6, [], "run.resume: all 5 iterations are done; train.iterations=12 goes on"),
        (None, [], "run.resume: begins at step 0, for an earlier attempt ended before its first checkpoint"),
        (
            None,
            lines(1, 2),
            "run.resume: begins at step 0, for an earlier attempt ended before its first checkpoint, whose 2 iterations are "
            "dropped and taken again",
        ),
    ],
)
def test_what_a_resume_does_is_one_sentence(step, written, sentence):
    assert resume.describe_resume(step, 5, written) == sentence


def test_a_run_without_a_checkpoint_is_not_finished(tmp_path):
    told(tmp_path, 1, 2)
    assert not resume.is_finished(tmp_path, iterations=2, patience=10)
