"""Rewards that another process serves give the numbers they give here."""

import re
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import numpy as np
import pytest
import torch
from runs import serving

import rewards
from flowgrpo.data.generators.scenes import arrange, draw, every_caption
from rewards import Reward, RewardError

MINE = """
import time
from pathlib import Path

def wait():
    while Path("hold").exists():
        time.sleep(0.01)

def checksum(images, prompts):
    return images.double().mul(2.0 ** 30).sum((1, 2, 3))

def red(images, prompts):
    return images[:, 0].mean((1, 2))

def letters(texts, prompts, extra):
    return [len(text) + n for text, n in zip(texts, extra)]

def some(images, prompts, count):
    return [None if n is None else float("nan") if n == "nan" else n / 3 for n in count]

def size(images, prompts):
    wait()
    if "broken" in prompts:
        raise RuntimeError("out of luck")
    if "leave" in prompts:
        raise SystemExit(3)
    return [len(prompts)] * len(prompts)

class Ranked:
    group_wise = True
    def __init__(self, scale=1.0):
        self.scale = scale
    def __call__(self, images, prompts):
        wait()
        return [self.scale * len(prompts)] * len(prompts)
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """URLs by name of rewards that another process serves, and the folder where it runs."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "mine.py").write_text(MINE)
    names = ("checksum", "red", "letters", "some", "size")
    words = ["shapes", *(f"./mine.py:{name}" for name in names), "{use: './mine.py:Ranked', options: {scale: 2.0}}"]
    with serving(*words, folder=folder) as (_, urls):
        yield {**urls, "folder": folder}


def pictures(number, seed=0):
    """Drawn captions under noise, and captions of which half are those of other pictures."""
    rng = np.random.default_rng(seed)
    texts = [every_caption()[i] for i in rng.integers(0, len(every_caption()), number)]
    images = np.stack([draw(arrange(text, rng)) for text in texts])
    noisy = (images + 0.05 * rng.standard_normal(images.shape)).clip(0, 1)
    return torch.from_numpy(noisy.astype(np.float32)), texts[: number // 2] + texts[: number - number // 2]


def counted(url):
    """What the server has counted for the reward at a URL."""
    base, _, name = url.rpartition("/")
    lines = [
        line.split() for line in httpx2.get(f"{base}/metrics", verify=False).text.splitlines() if f'"{name}"' in line
    ]
    return {key.partition("{")[0].removeprefix("flowgrpo_"): float(value) for key, value in lines}


def in_a_row(served, name, *calls):
    """What each call returned or raised, when all came, in this order, while the first was under way."""
    hold, pool, jobs = served["folder"] / "hold", ThreadPoolExecutor(len(calls)), []
    hold.touch()
    before = counted(served[name])["requests_total"]
    for i, call in enumerate(calls):
        jobs.append(pool.submit(call))
        while counted(served[name])["requests_total"] < before + i + 1:
            time.sleep(0.01)
    hold.unlink()
    return [job.exception() or job.result() for job in jobs]


def test_shapes_in_another_process_gives_the_local_numbers(served):
    images, texts = pictures(24)
    local, remote = rewards.load("shapes"), rewards.load(served["shapes"])
    assert remote.name == "shapes"
    values = local(images, texts, {})
    assert len(set(values.tolist())) > 3
    assert remote(images, texts, {"unknown": [object()] * 24}).equal(values)  # takes no columns, and is sent none


def test_texts_travel_too(served):
    reward = rewards.load(served["letters"])
    assert reward(["four", "µ", ""], ["a", "b", "c"], {"extra": [1, 2, 3]}).tolist() == [5, 3, 3]


def test_a_layout_in_memory_changes_no_bit(served):
    images = pictures(4)[0].contiguous(memory_format=torch.channels_last)
    reward = Reward("red", lambda images, prompts: images[:, 0].mean((1, 2)))
    assert rewards.load(served["red"])(images, ["a"] * 4, {}).equal(reward(images, ["a"] * 4, {}))


def test_every_bit_of_a_float_arrives(served):
    images, texts = pictures(5)
    assert len(torch.unique(images)) > 2**14
    expected = images.double().mul(2.0**30).sum((1, 2, 3))
    assert rewards.load(served["checksum"])(images, texts, {}).equal(expected)


def test_columns_travel_and_none_and_not_a_number_come_back_as_the_contract_has_them(served):
    reward = rewards.load(served["some"])
    values = reward(torch.rand(4, 3, 8, 8), ["a"] * 4, {"count": [1, None, "nan", 2], "other": [1] * 4})
    assert values[[0, 3]].tolist() == [1 / 3, 2 / 3]
    assert values[1].isnan()  # not applicable
    assert values[2].isinf()  # lost


def test_requests_that_wait_are_joined_and_a_broken_one_hurts_itself_alone(served):
    reward = rewards.load(served["size"], options={"retries": 0})

    def call(*prompts):
        return lambda: reward(torch.rand(len(prompts), 3, 8, 8), prompts, {}).tolist()

    assert in_a_row(served, "size", call("a"), call("b", "c"), call("d")) == [[1], [3, 3], [3]]
    first, good, broken, other = in_a_row(served, "size", call("a"), call("b", "c"), call("broken"), call("d"))
    assert (first, good, other) == ([1], [2, 2], [1])  # after the four together failed, each alone
    assert isinstance(broken, RewardError)
    assert re.search(r"500: the reward 'size' failed: RuntimeError: out of luck", str(broken))
    *others, left = in_a_row(served, "size", call("a"), call("b", "c"), call("d"), call("leave"))
    assert others == [[1], [2, 2], [1]]
    assert re.search(r"500: the reward 'size' failed: SystemExit: 3", str(left))

    def larger():
        return reward(torch.rand(1, 3, 9, 9), ["c"], {}).tolist()

    assert in_a_row(served, "size", call("a"), call("b"), larger, call("d")) == [[1], [1], [1], [1]]


def test_a_group_wise_reward_is_known_as_such_and_never_joined(served):
    reward = rewards.load(served["Ranked"])
    assert reward.group_wise
    call = [lambda n=n: reward(torch.rand(n, 3, 8, 8), ["a"] * n, {}).tolist() for n in (1, 2, 3)]
    assert in_a_row(served, "Ranked", *call) == [[2.0], [4.0] * 2, [6.0] * 3]


def test_metrics_count(served):
    before = counted(served["checksum"])
    rewards.load(served["checksum"])(torch.rand(3, 3, 8, 8), ["a"] * 3, {})
    after = counted(served["checksum"])
    grown = {key: after[key] - before[key] for key in after}
    assert grown.pop("seconds_total") > 0
    assert grown == {"requests_total": 1, "failures_total": 0, "calls_total": 1, "samples_total": 3, "waiting": 0}
