"""Guidance of methods that train on final samples: rollouts may have it, updates do not."""

from contextlib import contextmanager

import pytest
import torch
from field import settings, trainer

from flowgrpo.config import validated
from flowgrpo.errors import InputError
from flowgrpo.flow.methods import likelihood_rules, presets
from flowgrpo.flow.pipeline.velocity_field import FieldPolicy
from flowgrpo.schema.choose import filled

SCALE, MEAN = 4.5, 0.7


def velocity(x, sigma, mean, std):
    """Of N(mean, std^2), exactly."""
    variance = (1 - sigma) ** 2 * std**2 + sigma**2
    return (sigma - (1 - sigma) * std**2) / variance * (x - (1 - sigma) * mean) - mean


class Conditional(torch.nn.Module):
    """The velocity of N(mean, 0.5^2), guided away from that of N(0, 1) by `scale`."""

    def __init__(self):
        super().__init__()
        self.mean, self.scale, self.asked = torch.nn.Parameter(torch.full((2,), MEAN)), SCALE, []

    def forward(self, x, sigma, rows):
        self.asked.append((self.scale, torch.is_grad_enabled()))
        sigma = sigma[:, None]
        without = velocity(x, sigma, 0.0, 1.0)
        return without + self.scale * (velocity(x, sigma, self.mean, 0.5) - without)


class Guided(FieldPolicy):
    def unguided(self):
        return {"guidance_scale": 1.0}

    @contextmanager
    def call_overrides(self, guidance_scale=None, **call):
        field = self.modules["field"]
        before, field.scale = field.scale, guidance_scale or field.scale
        yield
        field.scale = before


@pytest.mark.parametrize(("guidance", "trained", "rises"), [("rollout", 1.0, True), ("pipeline", SCALE, False)])
def test_guidance_is_learnt_by_the_conditional_velocity_and_not_unlearnt(
    tmp_path, monkeypatch, guidance, trained, rises
):
    """Guided samples lie above the mean: what is fitted to them rises, but a velocity that is guided twice falls."""
    monkeypatch.setattr("field.FieldPolicy", Guided)
    sizes = {"train__groups": 4, "train__group_size": 64, "train__iterations": 1, "train__updates": 1}
    chosen = settings(tmp_path, algorithm={"preset": "rwr"}, model__guidance=guidance, **sizes)
    field = Conditional()
    run = trainer(chosen, field, reward=lambda samples, prompts: torch.ones(len(samples)), held_out=0, steps=10)
    run.run()
    assert {scale for scale, learns in field.asked if learns} == {trained}
    assert SCALE in {scale for scale, learns in field.asked if not learns}
    assert bool((field.mean > MEAN).all()) is rises
    assert bool((field.mean < MEAN).all()) is not rises


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_each_row_of_final_samples_sets_its_guidance_and_its_draft_unless_the_config_does(preset):
    row = filled({"algorithm": {"preset": preset}}, presets.BESIDE, "flow_grpo")
    own = row.get("model", {}).get("guidance", "pipeline")
    assert ("draft" in row.get("train", {})) == (preset == "sol_rl")
    written = {"model": {"guidance": "pipeline"}, "train": {"draft": None}, "algorithm": {"preset": preset}}
    assert filled(written, presets.BESIDE, "flow_grpo") == written
    assert (own == "pipeline") == (presets.PRESETS[preset]["likelihood"]["name"] == "trajectory")


@pytest.mark.parametrize(
    ("guidance", "said"),
    [("pipeline", "un-learns guidance; take rollout"), ("none", "with none nft samples and trains")],
)
def test_a_guided_call_of_final_samples_is_warned_of(guidance, said):
    config = validated({"model": {"path": "shapes", "guidance": guidance}, "algorithm": {"preset": "nft"}})
    (sentence,) = likelihood_rules.guidance_warnings(config, 2)
    assert said in sentence
    assert likelihood_rules.guidance_warnings(config, 1) == []
    with pytest.raises(InputError, match=r"^model.guidance: steps of a trajectory are scored as they were walked"):
        validated({"model": {"path": "shapes", "guidance": "rollout"}})
