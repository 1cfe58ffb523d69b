"""A run whose reward lives in a server, which then dies: real processes."""

import re

import pytest
import runs

import flowgrpo
from flowgrpo.training.run.stop_reasons import Broken


@pytest.fixture
def serving(workplace):
    """A process that serves ./mine.py:redness, and its URL."""
    with runs.serving("./mine.py:redness") as (process, urls):
        yield process, urls["redness"]


def test_a_run_learns_from_a_served_reward_as_from_a_local_one_and_outlives_the_server(
    workplace, serving, refused, monkeypatch
):
    server, url = serving
    served = {"rewards": [{"use": url, "name": "redness", "options": {"retries": 0}}]}
    fewer = {"train.updates": 1, "train.iterations": 1, "eval": {"every": 1, "prompts": 1, "save": 0}}
    local, remote = (
        flowgrpo.train("tiny.yaml", {"run.name": n, **fewer, **o}).metrics
        for n, o in (("local", {}), ("served", served))
    )
    for left, right in zip(local, remote, strict=True):
        shared = [key for key in left if not key.startswith(("time/", "memory/"))]
        assert {key: left[key] for key in shared} == {key: right[key] for key in shared}

    runs.at_rollout(monkeypatch, 1, lambda: (server.kill(), server.wait()))
    settings = {"run.name": "killed", **fewer, "eval.every": 3, "train.iterations": 3, **served}
    with pytest.raises(Broken, match="^ended after step 3: no held-out sample has a reward any more$"):
        flowgrpo.train("tiny.yaml", settings)
    log = (workplace / "runs/killed/log.txt").read_text()
    assert re.search(r"'redness' failed \(NoAnswer: http://.* could not be .*; its 4 samples are dropped", log)
    trained = runs.metrics(workplace / "runs/killed")
    assert len(trained) == 3
    assert (trained[0]["reward/lost"], trained[-1]["reward/lost"]) == (0, 8)
    assert trained[0]["reward/redness/mean"] is not None
    assert trained[-1]["reward/mean"] is None
    assert (workplace / "runs/killed/checkpoints/step-000003").is_dir()

    said = refused("train", "tiny.yaml", "run.name=refused", f"rewards=[{{use: '{url}', options: {{retries: 0}}}}]")
    assert said.startswith(f"{url.removesuffix('/redness')}/health could not be reached")
    assert not (workplace / "runs/refused").exists()
