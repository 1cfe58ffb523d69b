"""What a training run of a language model refuses in a sentence, before anything is written."""

import pytest

from flowgrpo.commands.runs import train as run
from flowgrpo.errors import InputError
from rewards import RewardError


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"algorithm__decoder": {"steps": 3, "region": {"block_length": 2}}}, "3 does not divide into 2 blocks"),
        ({"eval__decoder": "thresholds"}, "^eval.decoder.name: 'thresholds' is unknown, did you mean 'threshold'"),
        ({"eval__decoder": 3}, "^eval.decoder: 3 is not a map of keys"),
        ({"eval__decoder__proposal": {"temperature": "abc"}}, "^eval.decoder.proposal.temperature: 'abc' is wrong"),
        ({"algorithm__decoder__cfg_scale": "abc"}, "^algorithm.decoder.cfg_scale: 'abc' is wrong"),
        ({"algorithm__decoder__suppressed": [11]}, "^algorithm.decoder.suppressed: 11 is outside the vocabulary of 11"),
        ({"eval__decoder__suppressed": [99999]}, "^eval.decoder.suppressed: 99999 is outside the vocabulary of 11"),
        ({"algorithm__preset": "gdop"}, "did you mean 'gdpo'"),
        ({"algorithm__preset": "bgpo", "algorithm__objective__kl": {"beta": 1}}, "algorithm.objective.kl: unknown key"),
        ({"algorithm__preset": "igpo", "algorithm__hints__column": "reasoning"}, "no training prompt has 'reasoning'"),
        ({"algorithm__preset": "igpo", "algorithm__hints__column": "letters"}, r"'letters' holds \['a'\], a solution"),
        ({"algorithm__preset": "igpo", "algorithm__hints__tail": 4}, "algorithm.hints.tail"),
        (
            {"algorithm__preset": "igpo", "rewards": [{"use": "tags"}, {"use": "./a.py:b", "name": "right"}]},
            "^algorithm.hints.reward: name the reward that measures success, one of tags, right",
        ),
        (
            {"algorithm__preset": "igpo", "algorithm__hints__reward": "vowel"},
            "^algorithm.hints.reward: 'vowel' is not one of rewards, did you mean 'vowels'",
        ),
        ({"model__lora": {"targets": []}}, "model.lora.targets"),
        ({"algorithm__preset": "igpo", "algorithm__hints__chunk": [10, 5]}, "algorithm.hints.chunk: 10 is above 5"),
        ({"algorithm__decoder__proposal": "sampel"}, "algorithm.decoder.proposal: 'sampel' is unknown"),
        ({"algorithm__decoder__proposal": 3}, "^algorithm.decoder.proposal: 3 is wrong"),
        (
            {"algorithm__preset": "co_grpo", "algorithm__schedule__start": {"temperature": [0.5, 0.6]}},
            "algorithm.schedule.start.temperature: 2 numbers for 4 steps",
        ),
        ({"algorithm__preset": "co_grpo", "algorithm__hints": "inpainting"}, "algorithm.hints: a learned schedule allows"),
        ({"algorithm__schedule": "learned"}, "algorithm.decoder=scheduled"),
        ({"algorithm__preset": "cj_grpo", "algorithm__hints": "inpainting"}, "algorithm.hints: trajectory needs a step"),
        ({"algorithm__objective": {"surrogate": "frozen_ratio", "dual": 3.0}}, "^algorithm.objective.dual: .* take null"),
        ({"algorithm__objective": {"surrogate": "frozen", "gate": [1, 1]}}, "did you mean 'frozen_ratio'"),
        (
            {"algorithm__preset": "gdpo", "algorithm__objective": {"clamp": 0.4, "gate": [1.0, 1.0]}},
            "^algorithm.objective.gate: with clamp the ratio of an answer is not clipped, take null",
        ),
        (
            {"algorithm__preset": "gdpo", "algorithm__objective": {"power": 1.0, "normalised": False}},
            "^algorithm.objective.power: it is for a mean over tokens, take normalised=true",
        ),
        (
            {"algorithm__objective": {"clip_range": [0.05, 0.2], "balance": {}}},
            r"^algorithm.objective.clip_range: \[0.05, 0.2\] cannot move to .*; .* such as \[0.4, 0.2\]",
        ),
        (
            {"algorithm__objective": {"balance": {}, "surrogate": "tapered_ratio"}},
            "^algorithm.objective.balance: there is no clip range to move; take null",
        ),
        (
            {"algorithm__objective": {"clip_range": [0.4, 0.2], "balance": {}, "covariance": {"rule": "kl"}}},
            "^algorithm.objective.balance: with covariance.rule=kl no ratio is clipped, take null",
        ),
        (
            {"algorithm__objective": {"covariance": {"rule": "kl"}, "dual": 3.0}},
            "^algorithm.objective.dual: with covariance.rule=kl no ratio is clipped, take null",
        ),
        (
            {"algorithm__objective": {"covariance": {"rule": "kl", "bounds": [0.0, 1.0]}}},
            "^algorithm.objective.covariance.bounds: kl has none, take rule=clip",
        ),
        (
            {"algorithm__objective": {"covariance": {"bounds": [2.0, 1.0]}}},
            "^algorithm.objective.covariance.bounds: .* write the lower one first",
        ),
        (
            {"algorithm__aggregation__shape": {"rule": "conflict", "share": 0.5}},
            "^algorithm.aggregation.shape.share: conflict has none, take rule=largest",
        ),
        (
            {"algorithm__aggregation__shape": {"rule": "largest", "alpha": 2.0}},
            "^algorithm.aggregation.shape.alpha: largest has none, take rule=divergent",
        ),
        (
            {"algorithm__aggregation__shape": {"rule": "divergent"}, "train__split": "samples"},
            "^train.split: aggregation.shape.rule=divergent compares .* groups",
        ),
        (
            {"algorithm__aggregation__shape": {"rule": "divergent"}, "train__groups": 3, "train__updates": 1,
             "run__processes": 2},
            "^train.groups: .* whole because of algorithm.aggregation.shape.rule=divergent",
        ),
        (
            {"algorithm__preset": "d_tree_rpo", "algorithm__aggregation__shape": {"rule": "departed"}},
            "^algorithm.aggregation.shape.rule: departed compares .* branch is trained on once; take pivotal",
        ),
        (
            {"algorithm__preset": "d_tree_rpo", "algorithm__aggregation__shape": {"rule": "divergent"}},
            "^algorithm.aggregation.shape.rule: divergent compares .* branch is trained on once; take pivotal",
        ),
        (
            {"algorithm__preset": "gdpo", "algorithm__aggregation__shape": {"rule": "confident"}},
            "^algorithm.aggregation.shape: it weighs tokens, and sequence_ratio has one loss .* take objective=token_ratio",
        ),
        (
            {"algorithm__objective": "regression", "train__split": "samples"},
            "^train.split: objective=regression compares .* groups",
        ),
        (
            {"algorithm__objective": "regression", "train__groups": 3, "train__updates": 1, "run__processes": 2},
            "^train.groups: .* whole because of algorithm.objective=regression",
        ),
        ({"model__path": "nowhere/at all"}, "model.path"),
        ({"train__groups": 3}, "train.groups"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_anything_is_written(settings, tmp_path, overrides, sentence):
    with pytest.raises(InputError, match=sentence):
        run.train_config(settings(**overrides))
    assert not (tmp_path / "runs").exists()


ABSENT = "'mine' is only for completion = 'aaab', no held-out prompt has that; did you mean 'aaaa'"


@pytest.mark.parametrize(
    ("key", "function", "more", "error", "sentence"),
    [
        ("eval_rewards", "vowels", {"name": "mine", "only": {"completion": "aaab"}}, InputError, ABSENT),
        ("rewards", "broken", {}, RewardError, "returned 1 values for 2 samples"),
    ],
)
def test_a_reward_that_fits_no_row_or_breaks_its_contract_is_refused(
    settings, tmp_path, key, function, more, error, sentence
):
    with pytest.raises(error, match=sentence):
        run.train_config(settings(**{key: [{"use": f"{tmp_path / 'mine.py'}:{function}", **more}]}))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"model__chat": True}, "^model.chat: the tokenizer has no chat template"),
        (
            {"model__length": 126},
            "^model.length: a prompt of 3 tokens and 126 of an answer are more than the 128 .* take at most 125",
        ),
    ],
)
def test_prompts_that_do_not_fit_are_refused_before_the_weights_are_read(settings, monkeypatch, overrides, sentence):
    monkeypatch.setattr("flowgrpo.mdlm.setup.load_predictor", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(InputError, match=sentence):
        run.train_config(settings(**overrides))
