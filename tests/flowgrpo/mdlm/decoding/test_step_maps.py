"""What somebody else decoded, told by tokens and steps, is the rollout that our own decode returns."""

import predictors
import pytest
import torch

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.decode import Rollout, decode
from flowgrpo.mdlm.decoding.decoders import build
from flowgrpo.mdlm.decoding.step_maps import rebuild_rollout

LENGTH, EOS = 8, 5
PROMPT = torch.tensor([[predictors.PAD, 1, 2], [3, 4, 6], [predictors.PAD, predictors.PAD, 7]])
SEEN = PROMPT != predictors.PAD
SEEDS = [("row", i) for i in range(3)]


def told(rollout):
    """What an engine would send: the tokens of each row, and the steps, without what stands behind its end."""
    before = rollout.step_map < rollout.steps[:, None]
    assert (before[:, :-1] >= before[:, 1:]).all()
    counts = before.sum(1).tolist()
    return [
        [row[:count] for row, count in zip(table.tolist(), counts, strict=True)]
        for table in (rollout.completion, rollout.step_map)
    ]


def again(predictor, sent, **options):
    given = {"length": LENGTH, "fill_id": EOS, "attention_mask": SEEN, **options}
    return rebuild_rollout(predictor, PROMPT, *sent, **given)


def same(left, right):
    for name in Rollout.__dataclass_fields__:
        if name == "commit_logp":
            torch.testing.assert_close(left.commit_logp, right.commit_logp, rtol=0, atol=1e-9)
        else:
            assert torch.equal(getattr(left, name), getattr(right, name)), name


@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.parametrize(
    "decoder",
    [
        {"name": "low_confidence", "steps": 4, "proposal": {"temperature": 1.0}},
        {"name": "left_to_right", "steps": 8, "eos_early_stop": True, "region": {"block_length": 2}},
        {"name": "threshold", "committer": {"threshold": 0.4}, "proposal": {"temperature": 1.0}},
    ],
)
def test_read_again_a_decode_is_what_it_was_and_its_tokens_score_what_they_did(predictor, decoder, micro_batch):
    made = decode(predictor, PROMPT, build(decoder, LENGTH, EOS, predictor), SEEDS, attention_mask=SEEN)
    read = again(predictor, told(made), micro_batch=micro_batch)
    same(read, made)
    assert read.commit_logp.min() < -0.5


def test_steps_may_begin_anywhere_and_leave_numbers_out(predictor):
    made = decode(predictor, PROMPT, build("low_confidence", LENGTH, EOS, predictor), SEEDS, attention_mask=SEEN)
    tokens, steps = told(made)
    same(again(predictor, (tokens, [[3 * step + 10 for step in row] for row in steps])), made)


def test_given_tokens_are_seen_from_the_start_and_score_nothing(predictor):
    fixed = torch.full((3, LENGTH), predictors.MASK)
    fixed[:, 2] = 9
    decoder = build("low_confidence", LENGTH, EOS, predictor)
    made = decode(predictor, PROMPT, decoder, SEEDS, attention_mask=SEEN, fixed=fixed)
    read = again(predictor, told(made))
    same(read, made)
    assert read.commit_logp[:, 2].tolist() == [0.0] * 3


def test_behind_an_end_the_canvas_is_filled_at_no_step(predictor):
    read = again(predictor, ([[1, EOS], [2, 3, 4], []], [[1, 0], [0, 1, 1], []]))
    assert read.steps.tolist() == [2, 2, 0]
    assert read.completion[0].tolist() == [1] + [EOS] * 7
    assert read.step_map[0].tolist() == [1, 0] + [2] * 6
    assert (read.commit_logp != 0).sum(1).tolist() == [2, 3, 0]
    assert read.completion[2].tolist() == [EOS] * 8


def test_what_was_committed_later_was_masked_when_a_token_is_scored(predictor):
    """By hand: the second token first, with all of the rest masked, and then the first, which sees it."""
    read = again(predictor, ([[1, 2], [3], [4]], [[1, 0], [0], [0]]))
    canvas = torch.tensor([[1, 2, *[predictors.MASK] * 8]])
    first = predictor.logits(canvas).double().log_softmax(-1)[0, 3, 2]
    canvas[0, 3] = 2
    second = predictor.logits(canvas).double().log_softmax(-1)[0, 2, 1]
    torch.testing.assert_close(read.commit_logp[0, :2], torch.stack([second, first]), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("tokens", "steps", "said"),
    [
        ([[1]] * 2, [[0]] * 3, "steps: 3 rows of them, 2 of tokens and 3 prompts"),
        ([[1, 2], [1], [1]], [[0]] * 3, "steps: row 0 has 2 tokens and 1 steps"),
        ([[1] * 9, [1], [1]], [[0] * 9, [0], [0]], "completions: row 0 has 9 tokens, more than its 8 columns"),
        ([[1], [1], [-3]], [[0]] * 3, "completions: row 2 has -3, not an integer of at least 0"),
        ([[1]] * 3, [[0], [0.5], [0]], "steps: row 1 has 0.5, not an integer of at least -1"),
        ([[1]] * 3, [[0], [True], [0]], "steps: row 1 has True, not an integer of at least -1"),
        ([[1]] * 3, [[0], [None], [0]], "steps: row 1 has None, not an integer of at least -1"),
        ([[1], [99], [1]], [[0]] * 3, "completions: row 1 has the token 99, which no step of this model commits"),
        ([[1], [predictors.MASK], [1]], [[0]] * 3, "completions: row 1 has the token 15, which no step"),
    ],
)
def test_rows_that_no_decode_could_have_left_are_refused_in_a_sentence(predictor, tokens, steps, said):
    with pytest.raises(InputError, match=f"^{said}"):
        again(predictor, (tokens, steps))
