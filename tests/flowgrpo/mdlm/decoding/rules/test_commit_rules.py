"""Which positions a step commits, and how many."""

from dataclasses import replace

import pytest
import torch
from diffusers import BlockRefinementScheduler
from predictors import MASK, random_table

from flowgrpo.mdlm.decoding.decode import decode
from flowgrpo.mdlm.decoding.decoders import build
from flowgrpo.mdlm.decoding.rules.commit_rules import best

PROMPT = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8]])


def test_threshold_takes_one_step_at_0_and_the_order_of_confidence_above_1():
    predictor = random_table(4 + 12)
    region = {"block_length": 6}
    at = {t: build({"name": "threshold", "committer": {"threshold": t}, "region": region}, 12) for t in (0.0, 0.4, 1.1)}
    assert decode(predictor, PROMPT, at[0.0]).nfe.tolist() == [2, 2, 2]  # one step for each block
    slow = decode(predictor, PROMPT, at[1.1])
    surest = decode(predictor, PROMPT, build({"name": "low_confidence", "region": region}, 12))
    assert torch.equal(slow.step_map, surest.step_map)
    assert torch.equal(slow.ids, surest.ids)
    between = decode(predictor, PROMPT, at[0.4])
    for row, steps in zip(between.step_map, between.nfe.tolist(), strict=True):
        assert 2 < steps < 12
        assert (row.bincount() >= 1).all()


SCORES = [0.7, 0.99, 0.98, 0.97, 0.96, 0.1]
COMMITTED = [
    # with factor 1 the n-th largest has to reach 1 - 1 / (n + 1): 1/2, 2/3, 3/4, 4/5; with 2 it is 0, 1/3, 1/2
    ("factor", {}, [0.7, 0.76, 0.75, 0.9], [1, 2, 3]),
    ("factor", {}, [0.81, 0.8, 0.85, 0.9], [0, 1, 2, 3]),
    ("factor", {}, [0.3, 0.4, 0.1, 0.2], [1]),
    ("factor", {}, [0.6, 0.6, 0.6], [0]),
    ("factor", {"factor": 2.0}, [0.35, 0.4, 0.1, 0.2], [0, 1]),
    ("threshold", {"threshold": 0.75}, [0.5, 0.75, 1.0], [1, 2]),
    ("threshold", {"threshold": 0.5, "most": 4}, SCORES, [1, 2, 3, 4]),
    # of 2 steps, so 3 positions each
    ("block_refinement", {"threshold": 0.965}, SCORES, [1, 2, 3]),
    ("block_refinement", {"threshold": 0.985}, SCORES, [1, 2, 3]),
    ("block_refinement", {"threshold": 0.5}, SCORES, [0, 1, 2, 3, 4]),
    # a ratio that leaves none
    ("entropy", {"ratio": 0.9}, [0.1, 0.9, 0.5, 0.3], []),
    ("entropy", {"ratio": 0.9, "least": 2}, [0.1, 0.9, 0.5, 0.3], [1, 2]),
]


def committed(first_step, spec, scores, **changes):
    """Which of a block's positions, all open, a committer takes at a step."""
    decoder, ids = build(spec, len(scores)), torch.full((1, len(scores)), MASK)
    step = first_step(decoder, ids, **changes)
    return decoder.committer(step, torch.tensor([scores], dtype=torch.float64))[0].nonzero()[:, 0].tolist()


@pytest.mark.parametrize(("name", "committer", "scores", "expected"), COMMITTED)
def test_the_positions_of_a_step_are_those_by_hand(first_step, name, committer, scores, expected):
    spec = {"name": name, "committer": committer} | ({"steps": 2} if name == "block_refinement" else {})
    assert committed(first_step, spec, scores) == expected


def test_what_a_committer_says_of_positions_that_are_not_open_is_passed_over():
    """Two a step of 5 are three steps: at the last it names one that has its token."""
    predictor, plain = random_table(4 + 5), build("low_confidence", 5)
    two = replace(plain, committer=lambda step, scores: best(scores, torch.full_like(step.row, 2)))
    found = decode(predictor, PROMPT, two)
    assert (found.completion != predictor.mask_id).all()
    assert [row.bincount().tolist() for row in found.step_map] == [[2, 2, 1]] * 3
    window = build({"name": "low_confidence", "region": {"window": 1}}, 5)
    every = replace(window, committer=lambda step, _: torch.ones_like(step.open))
    assert decode(predictor, PROMPT, every).step_map.tolist() == [list(range(5))] * 3


@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.95])
def test_block_refinement_is_the_scheduler_of_diffusers(threshold):
    predictor = random_table(4 + 8, seed=3)
    spec = {"name": "block_refinement", "steps": 3, "committer": {"threshold": threshold}}
    rollout = decode(predictor, PROMPT, build(spec, 8))
    scheduler = BlockRefinementScheduler(block_length=8, num_inference_steps=3, threshold=threshold)
    scheduler.set_timesteps(3, block_length=8)
    for i, prompt in enumerate(PROMPT):
        block, step_map = torch.full((1, 8), MASK), torch.full((8,), -1)
        for s in range(int(rollout.nfe[i])):
            logits = predictor.logits(torch.cat([prompt[None], block], dim=1), start=4)
            out = scheduler.step(logits, s, block, mask_token_id=MASK, return_dict=True)
            step_map[out.transfer_index[0]] = s
            block = out.prev_sample
        assert torch.equal(block[0], rollout.completion[i])
        assert torch.equal(step_map, rollout.step_map[i])


def test_the_counts_of_dream_are_those_of_its_times():
    # times 1, .75025, .5005, .25075, .001: of 8 masks floor(8 x .24975) = 1, of 7 floor(2.33), of 5 floor(2.495), the rest
    rollout = decode(random_table(4 + 8), PROMPT, build({"name": "entropy", "steps": 4}, 8))
    assert [row.bincount().tolist() for row in rollout.step_map] == [[1, 2, 2, 3]] * 3


def test_the_reverse_process_commits_each_position_with_its_probability():
    rows = 2000
    decoder = build({"name": "origin", "steps": 4, "proposal": {"temperature": 1.0}}, 8)
    rollout = decode(random_table(2 + 8), torch.zeros(rows, 2).long(), decoder, range(rows))
    share = torch.stack([(rollout.step_map == s).double().mean() for s in range(4)])
    # a position stays with probability s / t at each step but the last: equal shares of the time but for its end
    torch.testing.assert_close(share, torch.tensor([0.24975] * 3 + [0.25075]).double(), rtol=0, atol=0.012)
    pairs = (rollout.step_map[:, 0] == 0) & (rollout.step_map[:, 1] == 0)
    assert pairs.double().mean().item() == pytest.approx(0.24975**2, abs=0.018)  # independent of each other


def test_steps_of_ascending_size_take_1_2_and_the_rest(first_step):
    scores = [0.8, 0.1, 0.2, 0.9, 0.7, 0.3, 0.4, 0.5]
    assert [committed(first_step, "ass", scores, in_block=s) for s in range(3)] == [[3], [0, 3], list(range(8))]
