"""A run whose reward server takes requests and never answers: a real process."""

import json
import re
from pathlib import Path

import pytest
import runs

from flowgrpo.cli import main

# Hangs once there is a file that says so.
HANGING = """
import time
from pathlib import Path
def redness(images, prompts):
    if Path("hang").exists():
        time.sleep(600)
    return images[:, 0].mean((1, 2))
"""
NO_ANSWER = r"did not answer within 0\.(5|4\d*) s"


@pytest.fixture
def url(workplace):
    (workplace / "mine.py").write_text(HANGING)
    with runs.serving("./mine.py:redness") as (_, urls):
        yield urls["redness"]


def test_a_server_that_hangs_costs_two_time_limits_an_iteration_and_ends_the_run_by_patience(
    workplace, url, capfd, monkeypatch
):
    rewards = f"rewards=[{{use: '{url}', name: redness, options: {{timeout: 0.5, retries: 0}}}}]"
    options = [rewards, "train.groups=4", "eval={every: 9, prompts: 1}", "run.patience=2", "run.checkpoint.keep=10"]
    run = workplace / "runs" / "t"

    runs.at_rollout(monkeypatch, 1, Path("hang").touch)
    assert main(["train", "tiny.yaml", *options, "train.iterations=9"]) == 1
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith("stopped after step 3: nothing to learn since step 1, every sample was lost; ")
    lines = runs.metrics(run)
    assert [(line["step"], line["reward/lost"], line["reward/mean"] is None) for line in lines] == [
        (1, 0, False), (2, 16, True), (3, 16, True),
    ]  # fmt: skip
    # Of four groups of four the first two are asked for, each for the time limit, and the others are not.
    log = (run / "log.txt").read_text()
    assert log.count("the reward 'redness' was not asked any more; 8 more samples are dropped") == 2
    assert len(re.findall(rf"{NO_ANSWER}\); its 4 samples are dropped", log)) == 2
    assert log.count("the reward 'redness' failed for 1 more call; 4 more samples are dropped") == 2
    assert json.loads((run / "checkpoints" / "step-000003" / "state.json").read_text())["sound"] is False
    assert "go on from step 1, the last that was sound, with: flowgrpo train tiny.yaml" in said

    assert main(["train", "tiny.yaml", *options, "run.resume=true"]) == 2
    assert re.search(f"flowgrpo: {re.escape(url)} {NO_ANSWER}", capfd.readouterr().err)
