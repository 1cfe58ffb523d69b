"""What the tests of several packages use."""

import pytest


@pytest.fixture
def unloaded(monkeypatch):
    """No model is loaded."""
    # The set-up first: it would keep a patched loader if it were imported after.
    for place in ("setup.policy_and_weights", "setup.load_policy", "pipeline.loading.load_policy"):
        monkeypatch.setattr(f"flowgrpo.flow.{place}", lambda *a, **k: pytest.fail("the model was loaded"))
