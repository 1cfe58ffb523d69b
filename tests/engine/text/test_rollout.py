"""What an engine decodes is read as the rollout that our own decoder returns, and scored as it scores."""

import pytest
import torch

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.decode import Rollout
from flowgrpo.mdlm.decoding.decoders import build
from flowgrpo.schema.engine import Engine
from flowgrpo_engine.asking import seed_of
from flowgrpo_engine.service import EngineError
from flowgrpo_engine.text.adapters import Adapters
from flowgrpo_engine.text.client import Client
from flowgrpo_engine.text.rollout import EngineRollout

PROMPTS = ["1,2,3=6:", "25,7,3=21:"]
MEMBERS = [(0, 0), (0, 1), (1, 0), (1, 3)]
TEXTS = [PROMPTS[group] for group, _ in MEMBERS]


def made(url, engine, learner, tmp_path, *, stops=False, length=8, **options):
    """An engine's rollout of the plain model, whose decoder is the engine's."""
    _, weights = learner
    section = Engine(url=url, retries=0, timeout=20, **options)
    spec = engine.decoder | {"proposal": {"temperature": 1.0}, "eos_early_stop": stops}
    decoder = build(spec, length, engine.policy.eos_id, engine.predictor)
    adapters = Adapters(Client(section), weights, tmp_path, "t", write=lambda out: None)
    return EngineRollout(section, engine.predictor, decoder, adapters)


def roll(rolled_by, policy, scored=True):
    given = {"seed": 3, "iteration": 5, "adapter": None, "scored": scored, "micro_batch": 3}
    return rolled_by.roll_out(policy.prompts(TEXTS), MEMBERS, **given)


@pytest.mark.parametrize(
    ("stops", "over_all"),
    [(False, True), (True, False), (True, True), pytest.param(False, False, marks=pytest.mark.zoo)],
)
def test_it_is_what_our_own_decode_of_the_same_seeds_returns(url, engine, learner, tmp_path, over_all, stops):
    engine.over_all = over_all
    by = made(url, engine, learner, tmp_path, stops=stops, length=20, log_probs=True)
    found = roll(by, engine.policy)
    seeds = [(seed_of(3, 5, group) + index,) for group, index in MEMBERS]
    own = engine.policy.generate(TEXTS, by.decoder, seeds, 4).rollout
    for name in Rollout.__dataclass_fields__:
        left, right = getattr(found.rollout, name), getattr(own, name)
        if name == "commit_logp":
            torch.testing.assert_close(left, right, rtol=0, atol=1e-5)
        else:
            assert torch.equal(left, right), name
    told = found.engine.isfinite()
    assert torch.equal(told, own.step_map < own.steps[:, None])
    torch.testing.assert_close(found.engine[told], own.commit_logp[told], rtol=0, atol=1e-5)
    assert bool(told.all()) != stops


def test_what_nobody_asks_for_is_neither_sent_nor_scored(url, engine, learner, tmp_path):
    by = made(url, engine, learner, tmp_path)
    before = engine.predictor.evaluations
    found = roll(by, engine.policy, scored=False)
    assert found.engine is None
    assert not found.rollout.commit_logp.any()
    assert engine.predictor.evaluations - before == found.rollout.steps.max() * len(
        MEMBERS
    )  # those of the engine itself
    assert all("return_logprob" not in body for _, body in engine.asked)


def test_an_answer_that_is_cut_at_its_end_is_scored_with_masks_behind_it(url, engine, learner, tmp_path):
    """As SGLang cuts it: what the engine wrote behind the end in its last block is not known here."""
    by = made(url, engine, learner, tmp_path, stops=True, length=20, log_probs=True)
    whole = roll(by, engine.policy).rollout
    engine.cuts = True
    cut = roll(by, engine.policy).rollout
    eos = engine.policy.eos_id
    for row in range(len(MEMBERS)):
        end = whole.completion[row].tolist().index(eos) + 1
        assert torch.equal(cut.completion[row, :end], whole.completion[row, :end])
        assert bool((cut.step_map[row, end:] == cut.steps[row]).all())
    assert engine.policy.texts(cut.completion) == engine.policy.texts(whole.completion)


def test_samples_of_a_group_share_a_request_up_to_the_most(url, engine, learner, tmp_path):
    roll(made(url, engine, learner, tmp_path), engine.policy)
    roll(made(url, engine, learner, tmp_path, samples=1), engine.policy)
    asked = [body["rid"] for path, body in engine.asked if path == "/generate"]
    assert sorted(map(len, asked)) == [1, 1, 1, 1, 2, 2]
    assert {name.rpartition("-")[0] for rids in asked for name in rids} == {"t-5-0-0", "t-5-0-1", "t-5-1-0", "t-5-1-3"}


def test_what_is_asked_for_again_has_another_name(url, engine, learner, tmp_path):
    by = made(url, engine, learner, tmp_path)
    for _ in range(2):
        roll(by, engine.policy)
    names = [name for path, body in engine.asked if path == "/generate" for name in body["rid"]]
    assert len({*names}) == len(names) == 2 * len(MEMBERS)


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda answer: answer["meta_info"].update(prompt_tokens=99), "completed a prompt of 99 tokens, where t-5-"),
        (lambda answer: answer["output_ids"].pop(), "has 7 tokens and 8 steps"),
        (lambda answer: answer["meta_info"]["step_maps"].__setitem__(0, 9), "leave some out: its tokens 0 to 3 have"),
        (lambda answer: answer["output_ids"].__setitem__(4, 4096), "has the token 4096, which no step of this model"),
    ],
)
def test_a_wrong_answer_is_one_sentence_with_its_place(url, engine, learner, tmp_path, edit, why):
    engine.edit = lambda answers: (edit(answers[0]), answers)[1]
    with pytest.raises(EngineError, match=rf"^{url} at /generate .*{why}"):
        roll(made(url, engine, learner, tmp_path), engine.policy)


def test_a_trial_refuses_an_engine_of_other_blocks_in_a_sentence_about_the_config(url, engine, learner, tmp_path):
    by = made(url, engine, learner, tmp_path)
    engine.decoder = {"name": "random", "steps": 8}
    engine.over_all = True
    with pytest.raises(
        InputError, match=rf"^run.engine: {url} at /generate sent steps of t-0-0-0-\w+ that leave some out"
    ):
        by.try_out(engine.policy.prompts(TEXTS[:1]))
