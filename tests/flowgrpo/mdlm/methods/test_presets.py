"""Text presets against what their released code says."""

import json
import math
from dataclasses import replace

import pytest
import torch
import yaml
from toy_predictor import answers

from flowgrpo import config
from flowgrpo.mdlm.config import TextConfig
from flowgrpo.mdlm.methods.likelihoods import likelihood
from flowgrpo.mdlm.methods.likelihoods.answers import in_scope
from flowgrpo.mdlm.methods.objectives.bounds import Sandwich
from flowgrpo.mdlm.methods.objectives.objective import LossInputs
from flowgrpo.mdlm.methods.presets import PRESETS
from flowgrpo.mdlm.methods.published import PUBLISHED
from flowgrpo.mdlm.planning.decoder_steps import training_decoder

# passes x updates x groups x answers of a group, rate; steps and blocks of a rollout, temperature, top_p
RELEASED = {
    "diffu_grpo": (12, 1, 16, 6, 3e-6, 128, 8, 0.9, 1.0),
    "coupled_grpo": (2, 1, 8, 10, 1e-6, 256, 1, 1.0, 0.95),
    "gdpo": (12, 1, 32, 6, 3e-7, 128, 8, 1.0, 1.0),
    "bgpo": (1, 1, 16, 8, 5e-7, 256, 16, 0.6, 1.0),
    "espo": (8, 1, 16, 6, 3e-6, 256, 8, 1.0, 1.0),
    "cj_grpo": (12, 1, 16, 6, 3e-6, 128, 2, 1.0, 1.0),
    "just_grpo": (1, 1, 64, 16, 5e-6, 256, 1, 1.0, 1.0),
    "igpo": (4, 1, 64, 8, 5e-7, 128, 8, 1.2, 1.0),
    "spg": (4, 1, 16, 6, 3e-6, 128, 8, 0.9, 1.0),
    "trace_rl": (1, 64, 32, 8, 1e-6, 512, 16, 0.8, 1.0),
    "d_tree_rpo": (12, 1, 4, 16, 3e-5, 128, 8, 0.9, 1.0),
    "ebpo": (1, 1, 16, 8, 5e-7, 2048, 64, 0.6, 1.0),
    "spo": (
        1,
        8,
        768,
        16,
        1e-6,
        None,
        1,
        1.0,
        1.0,
    ),  # of autoregressive models: the group's size and the decoder are ours
    "bnpo": (1, 1, 32, 16, 1e-6, None, 1, 1.0, 1.0),
    "dcpo": (1, 64, 512, 16, 1e-6, None, 1, 1.0, 1.0),
    "riskpo": (1, 4, 512, 10, 1e-6, None, 1, 1.0, 1.0),
    "dars": (2, 1, 3072, 8, 5e-6, None, 1, 1.0, 1.0),
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"kind": "mdlm", "model": {"path": "digits"}}))
    return path


def test_every_preset_states_its_published_numbers():
    assert PUBLISHED.keys() == PRESETS.keys()
    assert {preset for preset, stated in PUBLISHED.items() if stated} == RELEASED.keys()


@pytest.mark.parametrize("preset", RELEASED)
def test_published_numbers_are_overrides_of_a_config(file, preset):
    chosen = config.load(file, {"algorithm.preset": preset, **PUBLISHED[preset]})
    assert isinstance(chosen, TextConfig)
    train, decoder = chosen.train, training_decoder(chosen)
    assert (
        *(train.passes, train.updates, train.groups, train.group_size, train.learning_rate),
        *(chosen.algorithm.decoder.steps, len(decoder.region.blocks)),
        *(decoder.proposal.temperature, decoder.proposal.top_p),
    ) == RELEASED[preset]
    written = [f"{key}={json.dumps(value)}" for key, value in PUBLISHED[preset].items()]
    assert config.load(file, [f"algorithm.preset={preset}", *written]) == chosen


@pytest.mark.parametrize("length", [4, 20])
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_do_for_any_length(file, preset, length):
    hints = {"algorithm.hints.tail": 0} if preset == "igpo" else {}
    training_decoder(config.load(file, {"algorithm.preset": preset, "model.length": length, **hints}))


def inputs(given, views, new, **others):
    """What a loss gets for five answers of one group, at a token weight of 1 and advantages of 1 unless they are given."""
    standing = {
        "old": new,
        "advantage": torch.ones(5),
        "group": torch.zeros(5),
        "rank": torch.zeros(5),
        "token_weight": torch.ones(given.scored.shape),
        "reference": None,
    }
    return LossInputs(
        new=new,
        weight=views.weight,
        view_weight=views.view_weight,
        length=given.length,
        active_views=torch.ones(views.weight.shape[:2], dtype=torch.bool),
        order=views.first,
        **standing | others,
    )


def test_the_bounds_of_a_sandwich_are_those_of_the_released_code():
    """Written once more from its formulas: means over hidden tokens, and 1 / t of the share that is hidden."""
    given = answers(rows=5, scope="eos", length=8, end=6)
    chosen = likelihood.blocks(given, size=3, draws=2, prompt_rate=0.4)
    new = -3 * torch.rand(chosen.weight.shape, generator=torch.Generator().manual_seed(0)) * chosen.scored
    lower, upper = Sandwich(beta=1.5).bounds(inputs(given, chosen, new))
    for row in range(5):
        hidden = chosen.hidden[:, row, given.prompt_length :] & given.scored[row]
        means = [new[j, row][hidden[j]].mean().item() for j in range(2)]
        assert lower[row].item() == pytest.approx(sum(means) / 2, abs=1e-5)
        found = []
        for i in hidden.any(0).nonzero()[:, 0].tolist():
            rates = [hidden[j].sum() / given.scored[row].sum() for j in range(2)]
            powers = [(1.5 * new[j, row, i]).exp() * hidden[j, i] / rates[j] for j in range(2)]
            found.append(torch.log((powers[0] + powers[1]) / 2).item())
        assert upper[row].item() == pytest.approx(sum(found) / len(found) / 1.5, abs=1e-5)


def preset(name):
    """The axes of a preset."""
    return TextConfig.model_validate({"model": {"path": "digits"}, "algorithm": {"preset": name}}).algorithm


def test_the_loss_of_espo_is_the_released_one():
    """Written once more from its formulas: sums over a set and its complement, by their shares of the tokens plus one."""
    kind, given, random = preset("espo"), answers(rows=5, scope="canvas", length=8), torch.Generator().manual_seed(1)
    views = kind.likelihood.views(given)
    hidden = views.hidden[:, :, given.prompt_length :]
    draws = [-3 * torch.rand(views.weight.shape, generator=random, dtype=torch.float64) for _ in range(3)]
    new, old, reference = (each * views.scored for each in draws)
    advantage = torch.tensor([0.5, -1.0, 2.0, -0.3, 0.0], dtype=torch.float64)

    def elbo(each, row):
        pairs = []
        for mask, rest in zip(each[0::2, row], each[1::2, row], strict=True):
            k = int(hidden[2 * len(pairs), row].sum())
            shares = [k / 9, (8 - k) / 9]
            pairs.append(
                sum(float(part.sum()) / share for part, share in zip((mask, rest), shares, strict=True) if share)
            )
        return sum(pairs) / 2 / len(pairs)

    assert torch.equal(hidden[0], ~hidden[1])
    losses, kls = [], []
    for row in range(5):
        ratio = math.exp((elbo(new, row) - elbo(old, row)) / 8)
        losses.append(-min(ratio * advantage[row], min(max(ratio, 0.8), 1.2) * advantage[row]))
        kls.append((elbo(new, row) - elbo(reference, row)) ** 2 / 2 / 8)
    weight = kind.aggregation.weights(given.scored, advantage, views.first, lambda total: total)
    terms = inputs(given, views, new, old=old, reference=reference, advantage=advantage, token_weight=weight)
    expected = sum(losses) / 5 + 1e-3 * sum(kls) / 5
    assert kind.objective.loss(terms).item() == pytest.approx(float(expected), rel=1e-5)


def test_the_ratio_of_ebpo_is_that_of_whole_answers_and_clipped_in_log_space():
    """One view of three tokens; log ratios of tens of nats, and what the released code makes of them."""
    kind, given = preset("ebpo"), answers(rows=5, scope="canvas", length=3)
    views = likelihood.one_step(given, 0.0)
    gap = torch.tensor([0.1, 40.0, -40.0, -0.5, 3.0], dtype=torch.float64)
    advantage = torch.tensor([1.0, 1.0, -1.0, -2.0, -1.0], dtype=torch.float64)
    new = (gap / 3).expand(3, -1).T[None].clone().requires_grad_()
    weight = kind.aggregation.weights(given.scored, advantage, views.first, lambda total: total)
    terms = inputs(given, views, new, old=torch.zeros(1, 5, 3), advantage=advantage, token_weight=weight)
    loss = kind.objective.loss(terms)
    low, high = math.log(0.8), math.log(1.2)
    effective = [0.1, high, low, low, 3.0]  # min(gap, high) of good answers, max(gap, low) of bad ones
    each = [-a * math.exp(g) for a, g in zip(advantage.tolist(), effective, strict=True)]
    assert loss.item() == pytest.approx(sum(each) / 5, rel=1e-6)
    (slope,) = torch.autograd.grad(loss, new)
    moved = [each[0] / 5, 0.0, 0.0, 0.0, each[4] / 5]
    assert slope[0, :, 0].tolist() == pytest.approx(moved, rel=1e-6)
    assert kind.objective.stopped(terms).tolist() == [False, True, True, True, False]


def test_a_step_of_trace_rl_is_a_mean_and_its_kl_the_released_sum():
    """Two answers of 16 and 8 tokens, one a step: three merged steps of eight, a third of the loss each."""
    kind, given = preset("trace_rl"), answers(rows=2, scope="canvas", length=16)
    scored = given.scored.clone()
    scored[1, 8:] = False
    given = replace(given, scored=scored, steps=torch.arange(16).expand(2, -1))
    chosen = kind.likelihood.views(given)
    weight = kind.aggregation.weights(scored, torch.ones(2), chosen.first, lambda total: total)
    torch.testing.assert_close(weight, scored / 24)
    k3 = 0.5  # of each token: 0.01 x the sum over a step's eight, mean over the steps
    assert kind.objective.kl.beta * float((weight * k3).sum()) == pytest.approx(0.01 * 8 * k3)


def test_whole_canvases_are_scored_where_the_code_scores_them():
    whole = {preset for preset, row in PRESETS.items() if row["likelihood"].get("scope") == "canvas"}
    assert whole == {"cj_grpo", "just_grpo", "igpo", "espo"}
    assert in_scope(torch.tensor([[1, 5, 5]]), 5, "canvas").all()
