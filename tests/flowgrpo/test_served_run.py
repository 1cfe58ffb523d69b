"""A run whose reward lives in a server, and what becomes of it when the server dies: real processes."""

import json
import os
import re
import subprocess
import sys
import time

import pytest


@pytest.fixture
def serving(workplace):
    """A process that serves ./mine.py:redness, and its URL."""
    command = [sys.executable, "-m", "flowgrpo", "serve", "./mine.py:redness", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    yield process, process.stdout.readline().split()[1]
    process.kill()
    process.wait()


def run(name, use, *overrides):
    uses = f"rewards=[{{use: {use}, name: redness, options: {{timeout: 1, retries: 0}}}}]" if "//" in use else ""
    words = ["train", "tiny.yaml", f"run.name={name}", *([uses] if uses else []), *overrides]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-m", "flowgrpo", *words], stdout=pipe, stderr=pipe, text=True, env=os.environ
    )


def lines(workplace, name):
    path = workplace / "runs" / name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def of_training(workplace, name):
    return [line for line in lines(workplace, name) if line["phase"] == "train"]


def test_a_served_reward_trains_to_the_same_weights(workplace, serving):
    runs = [run("local", "./mine.py:redness"), run("served", serving[1])]
    assert [process.wait(120) for process in runs] == [0, 0], [process.stderr.read() for process in runs]
    for left, right in zip(lines(workplace, "local"), lines(workplace, "served"), strict=True):
        shared = [key for key in left if not key.startswith(("time/", "memory/"))]
        assert {key: left[key] for key in shared} == {key: right[key] for key in shared}


def test_a_run_outlives_its_server_and_says_what_happened(workplace, serving):
    server, url = serving
    training = run("t", url, "train.iterations=6", "eval.every=6", "eval.prompts=1")
    while not of_training(workplace, "t") and training.poll() is None:
        time.sleep(0.02)
    server.kill()
    _, said = training.communicate(timeout=120)
    assert training.returncode == 0, said
    assert re.search(
        r"the reward 'redness' failed 3 times \(RewardError: http://\S+ could not be reached .*; its 4 samples", said
    )
    trained = of_training(workplace, "t")
    assert len(trained) == 6
    assert (trained[0]["reward/lost"], trained[-1]["reward/lost"]) == (0, 8)
    assert trained[0]["reward/redness/mean"] is not None
    assert trained[-1]["reward/mean"] is None
    assert (workplace / "runs/t/checkpoints/step-000006").is_dir()


def test_a_server_that_is_not_there_is_refused_before_anything_is_computed(workplace, serving):
    serving[0].kill()
    serving[0].wait()
    training = run("t", serving[1])
    _, said = training.communicate(timeout=120)
    assert training.returncode == 2
    assert re.fullmatch(r"flowgrpo: http://127\.0\.0\.1:\d+/health could not be reached \(.*refused\)\n", said)
    assert not (workplace / "runs").exists()
