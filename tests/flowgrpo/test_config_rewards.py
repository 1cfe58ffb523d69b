"""Configs of several rewards, and of credit that compares them in nested sets: what is read and what is refused."""

import pytest
import yaml

from flowgrpo import config
from flowgrpo.errors import InputError

FLOW, TEXT = {"model": {"path": "shapes"}}, {"kind": "mdlm", "model": {"path": "digits"}}
NESTED, LEAVE_ONE_OUT = {"preset": "branch_grpo", "credit": "nested"}, {"baseline": "leave_one_out"}


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({}, "baseline: credit nested compares with means, take leave_one_out"),
        (
            {"preset": "tempflow", "credit": {"name": "nested", "group": 0, "siblings": 0}, **LEAVE_ONE_OUT},
            "credit: nested compares nothing, raise group, between or siblings above 0",
        ),
        ({"credit": {"name": "nested", "group": -1}}, "credit.group: -1 is wrong, input should be"),
        ({"credit": {"name": "nested", "levels": 2}}, "credit.levels: unknown key"),
        (
            {"preset": "ctpo", "baseline": {"name": "leave_one_out", "drop_zero": True}},
            "baseline.drop_zero: with nested it removes single steps of paths, but prefix_ratio needs whole paths",
        ),
    ],
)
def test_what_nested_comparisons_cannot_have(algorithm, said):
    with pytest.raises(InputError) as error:
        config.validate({**FLOW, "algorithm": NESTED | algorithm, "train": {"group_size": 24}})
    assert str(error.value).startswith(f"algorithm.{said}")


@pytest.mark.parametrize("kind", [FLOW, TEXT])
@pytest.mark.parametrize(
    ("baseline", "said"),
    [
        ({"combine": "least"}, "combine: 'least' is not allowed, "),
        ({"caution": 0.5}, "caution: sum has none, take algorithm.baseline.combine=cautious"),
        ({"combine": "worst", "caution": 0.5}, "caution: worst has none, take algorithm.baseline.combine=cautious"),
        ({"combine": "cautious", "caution": -1}, "caution: -1 is wrong, input should be greater than or equal to 0"),
        (
            {"name": "tracker", "combine": "decoupled"},
            "combine: tracker remembers one number for each prompt, take sum, worst or cautious",
        ),
        (
            {"name": "cumulative", "combine": "per_reward"},
            "combine: cumulative remembers one number for each prompt, take sum, worst or cautious",
        ),
        ({"name": "quantile", "levels": [0.8, 0.2]}, "levels: [0.8, 0.2] are not in ascending order; take [0.2, 0.8]"),
        ({"name": "quantile", "levels": [0.5, 0.5]}, "levels: [0.5, 0.5] are not in ascending order"),
        ({"name": "beta", "worst": 1.0}, "best: 1.0 is not above algorithm.baseline.worst = 1.0"),
        ({"name": "beta", "bound": 0.5}, "bound: 0.5 is wrong, input should be greater than or equal to 1"),
    ],
)
def test_what_rewards_cannot_be_put_together_by(kind, baseline, said):
    with pytest.raises(InputError) as error:
        config.validate({**kind, "algorithm": {"baseline": baseline}})
    assert str(error.value).startswith(f"algorithm.baseline.{said}")


@pytest.mark.parametrize("kind", [FLOW, TEXT])
@pytest.mark.parametrize("form", ["worst", "cautious"])
def test_a_reward_that_weighs_nothing_is_refused_where_all_are_members(kind, form):
    written = {**kind, "rewards": ["shapes", {"use": "jpeg_size", "weight": 0}]}
    with pytest.raises(InputError) as error:
        config.validate({**written, "algorithm": {"baseline": {"combine": form}}})
    said = f"rewards.1.weight: 0 makes it 0 for every sample, which {form} counts as any other"
    assert str(error.value).startswith(said)
    assert config.validate(written).rewards[1].weight == 0  # a sum leaves it out
    with pytest.raises(
        InputError, match=r"^rewards\.0\.weight: all weights are 0, so nothing is trained; set one to 1$"
    ):
        config.validate({**written, "rewards": [{"use": "shapes", "weight": 0}]})


@pytest.mark.parametrize("kind", [FLOW, TEXT])
def test_a_resolved_config_resolves_to_itself(kind):
    uses = [{"use": "shapes", "offset": 0.5}, {"use": "jpeg_size", "weight": -2}]
    baseline = {"name": "tracker", "combine": "cautious", "caution": 0.1}
    resolved = config.validate({**kind, "rewards": uses, "algorithm": {"baseline": baseline}})
    assert config.validate(yaml.safe_load(config.dump(resolved))) == resolved
    assert (resolved.rewards[0].offset, resolved.algorithm.baseline.combine) == (0.5, "cautious")


SELECTED = {"select": {"rule": "max_variance", "fraction": 0.5}}


@pytest.mark.parametrize(("written", "said"), [
    ({**TEXT, "algorithm": {"objective": "contrast", "baseline": "best"}}, "algorithm.baseline: best keeps one sample, but"),
    ({**TEXT, "algorithm": {"objective": "contrast", "baseline": "none"}}, "algorithm.baseline: with none, all samples"),
    ({**FLOW, "algorithm": {"preset": "gdro", "objective": "contrast"}}, "algorithm.baseline: with none, all samples"),
    (
        {**FLOW, "algorithm": {"preset": "dgpo", "objective": "contrast", "baseline": "group_mean"}},
        "algorithm.objective.penalty: samples of the live policy cannot measure the divergence from the reference policy",
    ),
    (
        {**FLOW, "algorithm": {"objective": {"covariance": {"rule": "clip"}}}},
        "algorithm.objective.covariance: the steps of a flow have constant entropy",
    ),
    (
        {**FLOW, "algorithm": {"preset": "dpo", "objective": {"name": "contrast", "rank_by": "shape"}}},
        "algorithm.objective.rank_by: 'shape' is not one of rewards, did you mean 'shapes'?",
    ),
    (
        {**FLOW, "algorithm": {"preset": "dpo", "objective": {"name": "contrast", "rank_temperature": 0.2}}},
        "algorithm.objective.rank_temperature: without rank_by good samples weigh alike, name a reward there",
    ),
    (
        {**TEXT, "algorithm": {"objective": {"name": "regression", "scale": 2.0, "eps": 0.1}}},
        "algorithm.objective.eps: with a scale nothing is divided by a standard deviation, remove eps",
    ),
    (
        {**TEXT, "algorithm": {"objective": "regression"}, "run": {"engine": {"log_probs": True}}},
        "run.engine.log_probs: regression weighs whole groups, not single answers; take false",
    ),
    (
        {**FLOW, "algorithm": {"baseline": "quantile"}, "train": SELECTED},
        "train.select.statistics: quantile remembers all rewards, take all",
    ),
])  # fmt: skip
def test_comparisons_that_would_teach_nothing_or_something_else_are_refused(written, said):
    with pytest.raises(InputError) as error:
        config.validate(written)
    assert str(error.value).startswith(said)
