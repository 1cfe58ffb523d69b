"""Which positions a step commits, and how many."""

from dataclasses import replace

import pytest
import torch
from diffusers import BlockRefinementScheduler
from predictors import MASK, random_table

from flowgrpo.mdlm.decoding.decode import decode
from flowgrpo.mdlm.decoding.decoders import build
from flowgrpo.mdlm.decoding.rules.commit_rules import best
from flowgrpo.mdlm.decoding.tokens.step import DecodeStep, Draws

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


def committed(spec, scores, **changes):
    """Which of a block's positions, all open, a committer takes at a step."""

    scores = torch.tensor([scores], dtype=torch.float64)
    number = torch.tensor([0])
    ids = torch.full(scores.shape, MASK)
    decoder, width = build(spec, scores.shape[1]), number + scores.shape[1]
    step = DecodeStep(
        frame=decoder.frame,
        row=number,
        index=number,
        in_block=0,
        block_masks=width,
        block=0,
        start=0,
        open=ids == MASK,
        ids=ids,
        attention_mask=ids == MASK,
        prompt=0,
        draws=Draws(["row"], scores.shape[1]),
    )
    return decoder.committer(replace(step, **changes), scores)[0].nonzero()[:, 0].tolist()


def test_factor_takes_the_most_that_are_sure_together():
    # with factor 1 the n-th largest has to reach 1 - 1 / (n + 1): 1/2, 2/3, 3/4, 4/5
    assert committed("factor", [0.7, 0.76, 0.75, 0.9]) == [1, 2, 3]
    assert committed("factor", [0.81, 0.8, 0.85, 0.9]) == [0, 1, 2, 3]
    assert committed("factor", [0.3, 0.4, 0.1, 0.2]) == [1]
    assert committed({"name": "factor", "committer": {"factor": 2.0}}, [0.35, 0.4, 0.1, 0.2]) == [0, 1]  # 0, 1/3, 1/2


def test_what_a_committer_says_of_positions_that_are_not_open_is_passed_over():
    """Two a step of 5 are three steps: at the last it names one that has its token."""
    predictor = random_table(4 + 5)
    decoder = replace(
        build("low_confidence", 5), committer=lambda step, scores: best(scores, torch.full_like(step.row, 2))
    )
    found = decode(predictor, PROMPT, decoder)
    assert (found.completion != predictor.mask_id).all()
    assert [row.bincount().tolist() for row in found.step_map] == [[2, 2, 1]] * 3
    window = replace(
        build({"name": "low_confidence", "region": {"window": 1}}, 5),
        committer=lambda step, _: torch.ones_like(step.open),
    )
    assert decode(predictor, PROMPT, window).step_map.tolist() == [list(range(5))] * 3


def test_threshold_with_a_share_and_a_limit():
    scores = [0.7, 0.99, 0.98, 0.97, 0.96, 0.1]
    share = {"name": "block_refinement", "steps": 2}  # 3 a step
    assert committed({**share, "committer": {"threshold": 0.965}}, scores) == [1, 2, 3]
    assert committed({**share, "committer": {"threshold": 0.985}}, scores) == [1, 2, 3]
    assert committed({**share, "committer": {"threshold": 0.5}}, scores) == [0, 1, 2, 3, 4]
    limited = {"name": "threshold", "committer": {"threshold": 0.5, "most": 4}}
    assert committed(limited, scores) == [1, 2, 3, 4]


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


def test_a_score_at_the_threshold_is_committed():
    assert committed({"name": "threshold", "committer": {"threshold": 0.75}}, [0.5, 0.75, 1.0]) == [1, 2]


def test_factor_compares_with_one_more_than_are_taken():
    assert committed("factor", [0.6, 0.6, 0.6]) == [0]  # 1/2 is reached, and of two 2/3 is not


def test_steps_of_ascending_size_take_1_2_and_the_rest():
    scores = [0.8, 0.1, 0.2, 0.9, 0.7, 0.3, 0.4, 0.5]
    assert [committed("ass", scores, in_block=s) for s in range(3)] == [[3], [0, 3], list(range(8))]


def test_a_step_commits_the_least_number_where_the_ratio_leaves_none():
    stay = {"name": "entropy", "committer": {"ratio": 0.9}}
    least = {"name": "entropy", "committer": {"ratio": 0.9, "least": 2}}
    assert [committed(spec, [0.1, 0.9, 0.5, 0.3]) for spec in (stay, least)] == [[], [1, 2]]
