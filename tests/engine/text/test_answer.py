"""Answers of an engine of texts: what is read of right ones, and a sentence for each wrong one."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from flowgrpo.mdlm.decoding.decoders import build
from flowgrpo_engine.service import EngineError
from flowgrpo_engine.text import answer
from flowgrpo_engine.text.answer import Asked

EOS, MASK = 5, 15
ASKED = Asked(name="t-0-1-2", prompt=[1, 2, 3], seed=9)
CAUSAL = SimpleNamespace(vocab_size=16, mask_id=MASK, block_size=4, pad_id=None, hidden_size=None)
PREDICTOR = SimpleNamespace(vocab_size=16, mask_id=MASK, block_size=None, pad_id=None, hidden_size=None)


def decoder(length=8, predictor=PREDICTOR, **options):
    region = {} if predictor is CAUSAL else {"region": {"block_length": 4}}
    return build({"name": "low_confidence", "steps": length, **region, **options}, length, EOS, predictor)


STOPS = decoder(eos_early_stop=True)
GOES_ON = decoder()


def sent(tokens, steps, **more):
    about = {"id": "t-0-1-2", "prompt_tokens": 3, "step_maps": steps, **more}
    return {"text": "", "output_ids": tokens, "meta_info": about}


def read(tokens, steps, by=GOES_ON, *, predictor=PREDICTOR, log_probs=False, **more):
    return answer.read(sent(tokens, steps, **more), ASKED, decoder=by, predictor=predictor, log_probs=log_probs)


TOKENS = [1, 2, 3, 4, 6, 7, 8, 9]


@pytest.mark.parametrize("second", [[2, 2, 1, 3], [5, 5, 4, 6]])
def test_steps_of_blocks_and_steps_over_all_say_the_same(second):
    """Three steps in the first block, three in the second."""
    found = read(TOKENS, [3, 1, 1, 2, *second])
    assert found.steps == [2, 0, 0, 1, 4, 4, 3, 5]
    assert (found.tokens, found.log_probs) == (TOKENS, None)


def test_of_a_block_that_the_end_cuts_off_steps_may_be_missing():
    assert read([1, 2, 3, 4, 6, EOS], [1, 1, 1, 1, 4, 2], STOPS).steps == [0, 0, 0, 0, 2, 1]
    assert read([1, 2, 3, 4, 6, EOS], [1, 1, 1, 1, 5, 3], STOPS).steps == [0, 0, 0, 0, 2, 1]
    assert read([EOS], [3], STOPS).steps == [0]


def test_blocks_of_a_causal_model_lie_by_the_prompt():
    """A prompt of 3 leaves one token of its block, and 8 tokens end 3 behind the start of one."""
    by = decoder(predictor=CAUSAL)
    assert answer.blocks_of(by, 3) == [(0, 1, 1), (1, 5, 5), (5, 8, 9)]
    assert read(TOKENS, [1, 2, 1, 2, 3, 4, 2, 1], by, predictor=CAUSAL).steps == [0, 2, 1, 2, 3, 6, 5, 4]
    assert answer.blocks_of(by, 4) == [(0, 4, 4), (4, 8, 8)]


def test_log_probabilities_are_read_as_pairs_with_their_tokens():
    pairs = [[-0.5 * i, token, None] for i, token in enumerate(TOKENS)]
    found = read(TOKENS, [1] * 8, log_probs=True, output_token_logprobs=pairs)
    assert found.log_probs == [-0.5 * i for i in range(8)]


@pytest.mark.parametrize(
    ("tokens", "steps", "why"),
    [
        (TOKENS, [1] * 7, "sent an answer that no decoding can produce, steps: t-0-1-2 has 8 tokens and 7 steps"),
        ([*TOKENS, 1], [1] * 9, "completions: t-0-1-2 has 9 tokens, more than its 8 columns"),
        ([*TOKENS[:7], 99], [1] * 8, "completions: t-0-1-2 has the token 99, which no step of this model commits"),
        ([*TOKENS[:7], MASK], [1] * 8, "has the token 15, which no step of this model commits"),
        ([*TOKENS[:7], "x" * 99], [1] * 8, "completions: t-0-1-2 has 'xxx[x]*, not an integer of at least 0$"),
        (TOKENS, [1, 1, 1, None, 1, 1, 1, 1], "steps: t-0-1-2 has None, not an integer"),
        (
            TOKENS,
            [1, 2, 2, 4, 1, 1, 1, 1],
            "leave some out: its tokens 0 to 3 have 1, 2, 4, not 1, 2, 3; check that it decodes",
        ),
        (
            TOKENS,
            [1, 2, 3, 4, 7, 6, 8, 9],
            "its tokens 4 to 7 have 6, 7, 8, 9, not 1, 2, 3, 4 or 5, 6, 7, 8; check that",
        ),
        (
            TOKENS,
            [8, 3, 2, 4, 1, 5, 6, 7],
            "its tokens 0 to 3 have 2, 3, 4, 8, not 1, 2, 3, 4; check that it decodes in the blocks of algorithm.decoder",
        ),
        (TOKENS, [0, 1, 2, 3, 4, 5, 6, 7], "sent the step 0 of t-0-1-2; the first step is 1"),
        (TOKENS[:6], [1] * 6, "sent 6 of the 8 tokens of t-0-1-2$"),
    ],
)
def test_what_cannot_have_been_decoded_is_one_sentence(tokens, steps, why):
    with pytest.raises(EngineError, match=why):
        read(tokens, steps)


def test_one_that_ends_too_early_needs_its_end():
    with pytest.raises(EngineError, match="^sent 2 of the 8 tokens of t-0-1-2, and none is the end of sequence$"):
        read([1, 2], [1, 1], STOPS)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"id": "t-0-1-3"}, "sent the completion 't-0-1-3' instead of 't-0-1-2'"),
        ({"prompt_tokens": 4}, "completed a prompt of 4 tokens, where t-0-1-2 has 3"),
        ({"prompt_tokens": None}, "completed a prompt of None tokens"),
        (
            {"step_maps": None},
            "sent no meta_info.step_maps, the step of each token; docs/research/engines.md names engines that send it",
        ),
    ],
)
def test_one_of_another_prompt_or_without_steps_is_one_sentence(more, why):
    with pytest.raises(EngineError, match=why):
        read(TOKENS, [1] * 8, **more)
    for wrong in ({}, {"meta_info": {}}, {"output_ids": []}, {"meta_info": [], "output_ids": []}):
        with pytest.raises(EngineError, match="^sent a completion without meta_info or output_ids$"):
            answer.read(wrong, ASKED, decoder=GOES_ON, predictor=PREDICTOR, log_probs=False)


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        (None, "sent no output_token_logprobs of t-0-1-2 for its 8 tokens"),
        ([[-1.0, 1]], "sent 1 output_token_logprobs of t-0-1-2 for its 8 tokens"),
        ([[-1.0, 1]] * 8, "sent output_token_logprobs of t-0-1-2 for other tokens than its own"),
        (
            [[math.nan, token] for token in TOKENS],
            "sent the log-probability nan of t-0-1-2, not a finite number of at most",
        ),
        ([[0.5, token] for token in TOKENS], "sent the log-probability 0.5 of t-0-1-2"),
        ([[None, token] for token in TOKENS], "sent the log-probability None of t-0-1-2"),
        ([[-(10**400), token] for token in TOKENS], "sent the log-probability -1000*, "[:-2]),
    ],
)
def test_log_probabilities_that_are_none_are_one_sentence(pairs, why):
    with pytest.raises(EngineError, match=why):
        read(TOKENS, [1] * 8, log_probs=True, output_token_logprobs=pairs)


NUMBERS = some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=3)
LISTS = some.lists(NUMBERS | some.integers(-1, 16), max_size=9)
ANYTHING = LISTS | NUMBERS | some.lists(LISTS, max_size=9)


@settings(max_examples=300, deadline=None)
@given(tokens=LISTS | ANYTHING, steps=some.lists(some.integers(-1, 9), max_size=9) | ANYTHING, pairs=ANYTHING)
def test_whatever_is_sent_is_a_completion_or_one_sentence(tokens, steps, pairs):
    try:
        found = read(tokens, steps, STOPS, log_probs=True, output_token_logprobs=pairs)
    except EngineError as error:
        said = str(error)
    else:
        said = ""
        assert sorted(set(found.steps)) == list(range(len(set(found.steps))))
        assert len(found.tokens) == len(found.steps) == len(found.log_probs)
    assert len(said) < 400
    assert "\n" not in said
