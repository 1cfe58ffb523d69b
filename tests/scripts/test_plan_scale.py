import importlib.util
import sys
from pathlib import Path

from flowgrpo import config
from flowgrpo.flow.budget import FlowBudget
from flowgrpo.flow.trial import Sampling, Trial
from flowgrpo.training.live import Peaks

SCRIPTS = Path(__file__).parents[2] / "scripts"
GIB = 2**30


def script(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    spec = importlib.util.spec_from_file_location("plan_scale", SCRIPTS / "plan_scale.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_more_gpus_hold_less_each_down_to_a_machine_or_to_what_none_can_share(monkeypatch):
    nothing = Sampling(step=Peaks(), decode=Peaks(), decode_tiled=None, sample=0)
    trial = Trial(
        components={"transformer": 40 * GIB},
        shapes={"transformer": {"blocks.0.up.weight": (1024, 1024)}},
        width=2,
        trained=0,
        state=0,
        encode=0,
        rollout=nothing,
        evaluate=None,
        update=Peaks(((0, GIB),)),
        update_checkpointed=None,
        dequantises=False,
    )
    settings = config.validated({"model": {"path": "shapes"}})
    budget = FlowBudget(
        config=settings, trial=trial, states=0, groups=1, group=1, loads_later=True, measure=lambda other: trial
    )
    assert script(monkeypatch).sizes(budget) == [
        "44 (update)",
        "7 (update) / 7 (update)",
        "3 (update) / 7 (update)",
        "2 (update) / 7 (update)",
    ]


def test_a_run_that_trains_all_is_that_of_the_built_in_config_without_a_lora(monkeypatch, tmp_path):
    settings = script(monkeypatch).settings_of("flux1-24gb", full=True, folder=tmp_path)
    lora = script(monkeypatch).settings_of("flux1-24gb", full=False, folder=tmp_path)
    assert (settings.model.lora, settings.model.quantise) == (None, None)
    assert lora.model.lora is not None
    assert settings.train.groups == lora.train.groups
    assert settings.model.gradient_checkpointing
