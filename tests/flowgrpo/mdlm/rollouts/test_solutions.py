"""Solutions in place of rollouts, and training on them through the command's own door."""

import json

import pytest
import torch
from runs import metrics

from flowgrpo import config
from flowgrpo.commands.runs import train as run
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import InputError
from flowgrpo.mdlm.methods.likelihoods.answers import in_scope
from flowgrpo.mdlm.planning.plan import plan, predict_cost
from flowgrpo.mdlm.rollouts.solutions import check_lengths, write_solutions
from flowgrpo.mdlm.setup import load_text_policy

TAUGHT = {"algorithm__objective": {"name": "one_token", "wrong": 0.0, "temperature": 4.0}, "train__updates": 1}


@pytest.fixture
def policy(settings):
    return load_text_policy(settings().model, torch.device("cpu"))


def test_a_solution_is_an_answer_that_ends_and_is_filled_up(policy):
    prompts = [Prompt("ab", {"completion": "cd"}), Prompt("c", {"completion": "abcd"})]
    found = write_solutions(policy, prompts, "completion")
    assert policy.texts(found.completion) == ["cd", "abcd"]
    assert found.completion[0, 2:].tolist() == [policy.eos_id] * 2
    assert found.step_map.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]  # the second end token fills the canvas
    assert torch.equal(in_scope(found.completion, policy.eos_id, "eos"), found.step_map < found.steps[:, None])
    prompt, mask = policy.prompts(["ab", "c"])
    assert torch.equal(found.ids[:, : found.prompt], prompt)
    assert torch.equal(found.attention_mask[:, : found.prompt], mask)
    assert found.attention_mask[:, found.prompt :].all()
    assert not found.nfe.any()
    assert not found.commit_logp.any()


def test_solutions_are_no_longer_than_answers(policy):
    long = [Prompt("a", {"proof": "abcdefg"}), Prompt("b", {"proof": "a"})]
    check_lengths(policy, long, None)
    with pytest.raises(InputError, match="the longest solution has 7 tokens and an answer 4, take at least 7"):
        check_lengths(policy, long, "proof")


@pytest.mark.parametrize(
    "attention", [{}, {"model__attention": "block", "model__block_size": 2}], ids=["full", "block"]
)
def test_a_model_learns_its_solutions_without_rollouts(settings, tmp_path, attention):
    """The solution of a prompt is its first letter, four times; the model begins at chance."""
    solved = [{"use": f"{tmp_path / 'mine.py'}:solved"}]
    chosen = settings(
        **TAUGHT,
        **attention,
        rewards=solved,
        algorithm__likelihood="autoregressive",
        train__iterations=16,
        train__learning_rate=0.01,
        train__group_size=2,
        train__passes=2,
        train__ema=None,
        eval__every=16,
        run__checkpoint__every=32,
    )
    cost = predict_cost(chosen)
    assert (cost.rollout, cost.rollout_fixed) == (0, True)
    folder = run.train_config(chosen).folder
    for line in metrics(folder):
        assert line["reward/mean"] == 1.0  # of the solutions
        assert line["cost/rollout_evaluations"] == 0
        assert line["cost/update_evaluations"] <= cost.update
        assert line["groups/teaching"] == 4
        assert "policy/max_abs_log_ratio" not in line or line["policy/max_abs_log_ratio"] is None
    before, after = (line["reward/mean"] for line in metrics(folder, "eval"))
    assert before < 0.3
    assert after == 1.0


REFUSED = [
    (
        {"likelihood": "trajectory"},
        "one_token trains on solutions, which have no decoding steps; take autoregressive or monte_carlo",
    ),
    ({"hints": "inpainting"}, r"algorithm\.hints: one_token learns from whole solutions, take none"),
    ({"aggregation": "balanced"}, "balanced weighs answers by their advantages, which one_token does not use; take"),
    (
        {"baseline": {"name": "group_mean", "drop_zero": True}},
        r"algorithm\.baseline\.drop_zero: one_token does not use rewards",
    ),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_what_needs_answers_of_the_policy_is_refused(words, message):
    with pytest.raises(InputError, match=message):
        config.validate(
            {"kind": "mdlm", "model": {"path": "digits"}, "algorithm": {"objective": {"name": "one_token"}, **words}}
        )


def test_prompts_without_solutions_are_refused_before_the_model_is_loaded(settings, tmp_path):
    (tmp_path / "bare.jsonl").write_text(json.dumps({"prompt": "ab"}) + "\n")
    chosen = settings(**TAUGHT, prompts__train=str(tmp_path / "bare.jsonl"))
    for look in (plan, run.train_config):
        with pytest.raises(InputError, match="training prompt 1 has no text in 'completion', it has no columns"):
            look(chosen)
