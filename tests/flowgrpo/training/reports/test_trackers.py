"""Trackers get numbers, config and pictures, under the names that the config gives, and a resumed run goes on in its own.

`tensorboard`, `wandb` (offline) and `trackio` are really run where they are installed; what each is told at its start is
also checked on a stand-in of accelerate's class.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from PIL import Image

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.data.prompts import Row
from flowgrpo.schema.sections import Run
from flowgrpo.training.reports import trackers
from flowgrpo.training.reports.report import Report
from flowgrpo.training.reports.samples import Sample, Text
from rewards.audio import Films

RARELY = ["train.updates=1", "train.group_size=2", "eval={every: 2, prompts: 1, save: 1}"]


class Recorder(GeneralTracker):
    requires_logging_directory = False
    made = []

    def __init__(self, project, *places, **options):
        super().__init__()
        self.project, self.places, self.options, self.stored, self.logged = project, places, options, [], []
        self.store_init_configuration = self.stored.append
        Recorder.made.append(self)

    tracker = property(lambda self: self)
    start = finish = store_init_configuration = lambda self, *values: None

    def log(self, values, step=None, **options):
        self.logged.append((step, values))


@pytest.fixture
def recorded(monkeypatch):
    """Let a stand-in take the place of installed trackers; give those that were made."""

    def play(*names):
        Recorder.made = []
        kinds = {name: type(name, (Recorder,), {"name": name}) for name in names}
        monkeypatch.setattr(trackers, "get_available_trackers", lambda: [SimpleNamespace(value=name) for name in names])
        monkeypatch.setattr(trackers, "LOGGER_TYPE_TO_CLASS", trackers.LOGGER_TYPE_TO_CLASS | kinds)
        monkeypatch.setattr(trackers, "_check_login", lambda: None)
        monkeypatch.setattr(trackers, "_log", lambda tracker, shown, step, newest: tracker.logged.append((step, shown)))
        return lambda: Recorder.made

    return play


def test_a_list_of_names_is_a_map_without_options():
    plain = Run.model_validate({"trackers": ["tensorboard", {"wandb": {"tags": ["a"]}}]})
    assert plain == Run.model_validate({"trackers": {"tensorboard": {}, "wandb": {"tags": ["a"]}}})
    assert plain.trackers["wandb"].project == "flowgrpo"


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("[wanb]", "run.trackers: there is no tracker 'wanb', did you mean 'wandb'?"),
        ("[swanlab]", "run.trackers: swanlab is not installed here"),
        ("{wandb: {projct: x}}", "run.trackers.wandb.projct: unknown key, did you mean 'project'?"),
        ("{tensorboard: {entity: me}}", "run.trackers.tensorboard.entity: tensorboard takes none, only wandb, swanlab"),
        ("{trackio: {tags: [a]}}", "run.trackers.trackio.tags: trackio takes none"),
    ],
)
def test_what_a_tracker_does_not_take_is_refused(workplace, capsys, recorded, written, words):
    recorded("wandb", "tensorboard", "trackio")
    assert main(["train", "tiny.yaml", f"run.trackers={written}"]) == 2
    assert words in capsys.readouterr().err
    assert not Path("runs").exists()


def test_each_tracker_gets_its_options_the_numbers_the_config_and_the_pictures(workplace, recorded):
    made = recorded("wandb", "trackio", "comet_ml")
    written = "{wandb: {project: p, entity: team, tags: [a, b]}, trackio: {name: mine}, comet_ml: {entity: w}}"
    assert main(["train", "tiny.yaml", f"run.trackers={written}"]) == 0
    wandb, trackio, comet = made()
    known = wandb.options.pop("id")
    told = {"name": "t", "entity": "team", "tags": ["a", "b"], "resume": "allow", "dir": "runs/t"}
    assert (wandb.project, wandb.options) == ("p", told)
    assert (trackio.project, trackio.options) == ("flowgrpo", {"name": "mine", "resume": "never"})
    assert comet.options == {"workspace": "w"}
    whole = config.of_run(Path("runs/t")).model_dump(mode="json")
    assert wandb.stored == trackio.stored == [whole]
    assert comet.stored[0]["train.learning_rate"] == 0.01
    assert comet.stored[0]["eval_rewards"] == "[]"
    assert json.loads(Path("runs/t/trackers.json").read_text())["wandb"] == {"id": known}
    numbers = [(step, values) for step, values in wandb.logged if isinstance(values, dict)]
    assert [step for step, values in numbers if "eval/reward/mean" in values] == [0, 1, 2]
    pictures = [(step, shown) for step, shown in wandb.logged if isinstance(shown, list)]
    assert [step for step, _ in pictures] == [0, 1, 2]
    assert [prompt for prompt, _ in pictures[0][1]] == ["a red circle", "two blue square"]  # as many as eval.save keeps
    with Image.open("runs/t/samples/step-000000/0000.png") as kept:
        assert np.array_equal(np.asarray(kept), pictures[0][1][0][1])


def test_a_resumed_run_goes_on_in_its_own(workplace, recorded):
    made = recorded("wandb", "trackio", "tensorboard")
    options = ["run.trackers=[wandb, trackio, tensorboard]", *RARELY]
    assert main(["train", "tiny.yaml", *options, "train.iterations=1"]) == 0
    assert main(["train", "tiny.yaml", *options, "run.resume=true"]) == 0
    (wandb, trackio, board), (again, further, onwards) = made()[:3], made()[3:]
    assert wandb.options["id"] == again.options["id"]
    assert (trackio.options["resume"], further.options["resume"]) == ("never", "allow")
    assert "purge_step" not in board.options
    assert onwards.options["purge_step"] == 2
    assert board.stored
    assert not onwards.stored


def test_a_tracker_that_cannot_start_is_one_sentence(workplace, recorded, monkeypatch, capsys):
    recorded("tensorboard", "wandb")

    def refuse(self):
        if self.name == "wandb":
            raise RuntimeError("no way\nto the service")

    command = ["train", "tiny.yaml", "run.trackers=[tensorboard, wandb]", *RARELY]
    with monkeypatch.context() as short:
        short.setattr(Recorder, "start", refuse)
        assert main(command) == 2
    words = (
        "run.trackers.wandb: it could not be started (RuntimeError: no way to the service); the run's folder is made"
    )
    assert words in capsys.readouterr().err
    assert main([*command, "train.iterations=1", "run.resume=true"]) == 0
    assert json.loads(Path("runs/t/trackers.json").read_text()).keys() == {"tensorboard", "wandb"}


def test_a_run_that_stops_waits_for_its_trackers(workplace, recorded, monkeypatch):
    made, ended = recorded("wandb"), []
    monkeypatch.setattr(Recorder, "finish", lambda self: ended.append(self))
    monkeypatch.setattr(Accelerator, "wait_for_everyone", lambda self: ended.append("all") if ended else None)
    (workplace / "mine.py").write_text("def redness(images, prompts):\n    return [0.0] * len(prompts)\n")
    assert main(["train", "tiny.yaml", "run.trackers=[wandb]", "train.iterations=1", *RARELY]) == 1
    assert ended == [*made(), "all"]


def test_of_a_video_some_frames_stand_side_by_side_and_texts_are_left_out(recorded):
    recorded("wandb")
    tracker = trackers.LOGGER_TYPE_TO_CLASS["wandb"]("p")
    accelerator = SimpleNamespace(is_main_process=True, trackers=[tracker])
    video = torch.arange(5).div(4).view(5, 1, 1, 1).expand(5, 3, 2, 4)
    decoded = [video, Text("x", [], []), torch.zeros(2, 100), None, Films(video, torch.zeros(1, 100))]
    samples = [Sample(i, Row("abcde"[i], i), {}, each) for i, each in enumerate(decoded)]
    trackers.log_pictures(accelerator, samples, 7, newest=7)
    [(step, [(prompt, picture), (of_film, same)])] = tracker.logged
    assert (step, prompt, picture.shape) == (7, "a", (2, 12, 3))
    assert of_film == "e"
    assert (same == picture).all()
    assert picture[0, ::4, 0].tolist() == [0, 128, 255]


def test_tensorboard_has_numbers_config_and_pictures(workplace):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = ["run.trackers={tensorboard: {project: boards}}"]
    assert main(["train", "tiny.yaml", *options, "train.iterations=1"]) == 0
    assert main(["train", "tiny.yaml", *options, "run.resume=true"]) == 0
    found = EventAccumulator("runs/t/boards").Reload()
    assert [event.step for event in found.Scalars("eval/reward/mean")] == [0, 1, 2]
    assert [event.step for event in found.Scalars("train/reward/mean")] == [1, 2]
    assert [event.step for event in found.Images("eval/samples/00")] == [0, 1, 2]
    assert found.Images("eval/samples/01")[0].width == 16
    [stored] = Path("runs/t/boards").glob("*/hparams.yml")
    assert yaml.safe_load(stored.read_text())["train.learning_rate"] == 0.01


def test_wandb_offline_keeps_one_run_with_its_config_and_pictures(workplace, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    options = ["run.trackers={wandb: {project: boards, tags: [x]}}"]
    assert main(["train", "tiny.yaml", *options, "train.iterations=1"]) == 0
    assert wandb.run is None
    known = json.loads(Path("runs/t/trackers.json").read_text())["wandb"]["id"]
    assert main(["train", "tiny.yaml", *options, "run.resume=true"]) == 0
    folders = sorted(path.name for path in Path("runs/t/wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert all(name.endswith(known) for name in folders)
    assert list(Path("runs/t/wandb").glob("offline-run-*/files/media/images/eval/samples_*.png"))


def test_wandb_without_a_login_is_refused_before_the_model_is_loaded(workplace, monkeypatch, capsys):
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(workplace))
    monkeypatch.setattr(wandb, "login", lambda prompt=None: False)
    assert main(["train", "tiny.yaml", "run.trackers=[wandb]"]) == 2
    assert "run.trackers.wandb: nobody is logged in; run `wandb login`" in capsys.readouterr().err


def test_trackio_has_numbers_and_pictures(workplace, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(workplace / "kept"))
    trackio = pytest.importorskip("trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", workplace / "kept", raising=False)
    assert main(["train", "tiny.yaml", "run.trackers={trackio: {project: boards}}"]) == 0
    lines = trackio.SQLiteStorage.get_logs("boards", "t")
    assert [line["step"] for line in lines if "eval/reward/mean" in line] == [0, 1, 2]
    assert [line["step"] for line in lines if "eval/samples/01" in line] == [0, 1, 2]


def test_what_comes_late_is_put_where_a_tracker_takes_it(tmp_path):
    """Weights & Biases drops what is of a step before its newest."""
    taken = {}

    def tracker(name):
        return SimpleNamespace(name=name, log=lambda values, **where: taken.setdefault(name, []).append(where))

    accelerator = SimpleNamespace(is_main_process=True, trackers=[tracker("wandb"), tracker("tensorboard")])
    report = Report(tmp_path, accelerator, 4)
    report.display = SimpleNamespace(print=lambda said: None)
    for step in (0, 2, 1, 2):
        report.write({"step": step, "phase": "eval", "reward/mean": 0.5, "cost/model_evaluations": 0})
    late = {"step": None, "commit": False}
    assert taken["wandb"] == [{"step": 0}, {"step": 2}, late, {"step": 2}]
    assert taken["tensorboard"] == [{"step": step} for step in (0, 2, 1, 2)]
    assert [line["step"] for line in report.lines] == [0, 2, 1, 2]
