"""The comparison in the plane: runs that learn, and that are one run for every arm where rollouts are fresh."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "research"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    path = SCRIPTS / "compare_staleness_plane.py"
    spec = importlib.util.spec_from_file_location("compare_staleness_plane", path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_fresh_rollouts_teach_every_arm_the_same(script):
    found = [
        script.learnt(objective, staleness=0, seed=0, rate=0.01, iterations=3) for objective in script.ARMS.values()
    ]
    assert found == [found[0]] * len(script.ARMS)
    before, after = found[0]
    assert after > before + 0.01


def test_stale_rollouts_teach_the_arms_different_things(script):
    found = [
        script.learnt(objective, staleness=2, seed=0, rate=0.01, iterations=5)[1] for objective in script.ARMS.values()
    ]
    assert len(set(found)) == len(script.ARMS)
