"""The embedded image model of four steps: what it shares, how it is sampled, and that it can be trained and exported."""

import statistics

import pytest
import torch

from flowgrpo import config
from flowgrpo.data.embedded import EMBEDDED
from flowgrpo.data.generators import scenes
from flowgrpo.data.prompts import Row
from flowgrpo.flow.outputs import export
from flowgrpo.flow.pipeline.loading.load import load_policy
from rewards.shapes import shapes

ROWS = [Row(prompt, seed) for seed, prompt in enumerate(scenes.captions("eval")[:12])]


def test_it_has_the_files_of_the_model_of_many_steps_but_for_its_transformer_and_its_schedule():
    many, few = EMBEDDED["shapes"].folder, EMBEDDED["shapes4"].folder
    files = {path.relative_to(many) for path in many.rglob("*") if path.is_file()}
    assert files == {path.relative_to(few) for path in few.rglob("*") if path.is_file()}
    own = {path.parts[0] for path in files if (few / path).read_bytes() != (many / path).read_bytes()}
    assert own == {"transformer", "scheduler"}


@pytest.fixture(scope="module")
def policy():
    return load_policy("shapes4")


def test_it_is_sampled_in_four_evaluations_whether_its_guidance_is_0_or_1(policy):
    """The captions are held out. With its steps the model of many steps gets 0.34 of their reward, this one 0.61."""
    images = []
    for scale in (1.0, 0.0):
        with policy.call_overrides(guidance_scale=scale):
            policy.generate(ROWS[:2])  # probes once
            before = policy.evaluations
            images.append(policy.generate(ROWS))
            assert policy.evaluations - before == 4 * len(ROWS)
    assert torch.equal(*images)
    rewards = shapes(images[0], [row.prompt for row in ROWS])
    assert 0.4 < statistics.mean(rewards) < 0.8


def test_each_of_its_four_steps_removes_noise(policy):
    assert [round(sigma, 2) for sigma in policy.sigmas] == [1.0, 0.93, 0.8, 0.5, 0.0]


def test_the_code_of_a_card_finds_it(policy):
    settings = config.validate({"model": {"path": "shapes4"}})
    code = export._snippet(policy, settings, adapter=".", call={}, row=ROWS[0])
    names, place = {}, "EMBEDDED['shapes4'].folder"
    lines = [line for line in code.splitlines() if line.startswith("from flowgrpo")]
    exec("\n".join(lines), names)
    assert f"from_pretrained({place}, " in code
    assert eval(place, names) == EMBEDDED["shapes4"].folder
