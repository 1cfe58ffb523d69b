"""What the tests of several packages use."""

from pathlib import Path

import pytest


@pytest.fixture
def small_pictures(monkeypatch):
    """Qwen-Image-Edit and its Plus enlarge the picture that they edit to 128 x 128 pixels, not to a million."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus

    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
        real = module.calculate_dimensions
        monkeypatch.setattr(
            module, "calculate_dimensions", lambda area, ratio, real=real: real(min(area, 128 * 128), ratio)
        )


@pytest.fixture
def counting_clock(monkeypatch):
    """Probes of batch sizes measure each call as equally long."""
    from in_batches import counting

    from flowgrpo.training.fitting import batch_probing

    monkeypatch.setattr(batch_probing, "clock", counting())


@pytest.fixture(scope="session")
def _tried():
    """Trials by what they read."""
    return {}


@pytest.fixture
def kept_trials(_tried, monkeypatch):
    """The trial of a plan is made once of each model, call and evaluation: it reads no other part of the config."""
    from flowgrpo.flow.planning import memory_budget

    real, unread = memory_budget.trial, {"model": {"path", "vae", "text_encoders"}}

    def trial(config, folder, row):
        files = [(path.name, path.read_text()) for path in sorted(Path(folder).rglob("*.json"))]
        read = config.model_dump_json(include={"model", "eval"}, exclude=unread)
        key = repr((read, files, row))
        if key not in _tried:
            _tried[key] = real(config, folder, row)
        return _tried[key]

    monkeypatch.setattr(memory_budget, "trial", trial)
