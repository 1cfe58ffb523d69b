"""The likelihood of block-causal models: each block given the clean ones before it, all in one row."""

import math
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from predictors import MASK, PAD, llama, qwen, qwen3
from toy_predictor import PLANS
from transformers import LlamaConfig, LlamaForCausalLM

from flowgrpo.mdlm.decoding.decode import decode
from flowgrpo.mdlm.decoding.decoders import build
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from flowgrpo.mdlm.methods.likelihoods import likelihood, masked_views
from flowgrpo.mdlm.methods.likelihoods.answers import Answers
from flowgrpo.mdlm.methods.likelihoods.estimate import estimate
from flowgrpo.mdlm.methods.objectives import aggregation

SIZE, LENGTH = 4, 9
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5], [8, 9, 7, 9, 3, 2, 3]]
HIDING = {
    "one_step_prompt": partial(likelihood.one_step, prompt_rate=0.4),
    "blocks_prompt": partial(likelihood.blocks, size=3, prompt_rate=0.4),
}


def finished(scope="canvas"):
    """Answers behind prompts that end elsewhere in their block, committed in random order block by block."""
    random, width = torch.Generator().manual_seed(3), max(map(len, PROMPTS))
    rows = [[PAD] * (width - len(row)) + row for row in PROMPTS]
    ids = torch.cat([torch.tensor(rows), torch.randint(13, (4, LENGTH), generator=random)], dim=1)
    scored = torch.ones(4, LENGTH, dtype=torch.bool)
    if scope == "eos":
        scored[1, 4:], scored[2, 6:] = False, False
    block = (torch.tensor([[len(prompt)] for prompt in PROMPTS]) + torch.arange(LENGTH)) // SIZE
    order = (torch.rand(4, LENGTH, generator=random) + block).argsort(1).argsort(1)
    steps = order // 2 * 2 + block  # two tokens a step, but none of two blocks
    addresses = [("blocks", row) for row in range(4)]
    return Answers(ids=ids, attention_mask=ids != PAD, scored=scored, addresses=addresses, steps=steps, block_size=SIZE)


def one_by_one(predictor, answers, chosen):
    """Log p (n, B, L) of the scored tokens: every block by itself, after the clean ones, without the later ones."""
    each = torch.zeros(chosen.weight.shape, dtype=torch.float64)
    for view, row, place in chosen.scored.nonzero().tolist():
        own = answers.attention_mask[row]
        clean, hidden = answers.ids[row, own], chosen.hidden[view, row, own]
        token = len(clean) - LENGTH + place
        block, end = token // SIZE * SIZE, min(token // SIZE * SIZE + SIZE, len(clean))
        canvas = clean.clone()
        hidden[len(clean) - LENGTH : max(block, len(clean) - LENGTH)] = False  # finished blocks of the answer
        canvas[hidden] = MASK
        number = torch.arange(end) // SIZE
        mask = torch.zeros(end, end, dtype=predictor.model.dtype)
        mask[number[:, None] < number] = torch.finfo(mask.dtype).min
        logits = predictor.model(canvas[None, :end], attention_mask=mask[None, None]).logits[0, token - predictor.shift]
        logits[MASK] = -torch.inf
        each[view, row, place] = logits.log_softmax(-1)[clean[token]]
    return each


def with_shifts(names):
    """Each name without a shift and with one, which is the predictor's alone: a plain run tries that with two names."""
    further = [pytest.param(name, True, marks=pytest.mark.zoo) for name in names[2:]]
    return [*((name, False) for name in names), *((name, True) for name in names[:2]), *further]


@pytest.mark.parametrize(("name", "shift"), with_shifts([*HIDING, *PLANS]))
def test_all_blocks_at_once_are_each_by_itself(name, shift):
    plan = (HIDING | PLANS)[name]
    predictor, answers = MaskPredictor(qwen3(), MASK, PAD, shift=shift, block_size=SIZE), finished("eos")
    chosen = plan(answers)
    found = estimate(predictor, answers, chosen, 5)
    assert predictor.evaluations == int(chosen.scored.any(2).sum())
    torch.testing.assert_close(found.each, one_by_one(predictor, answers, chosen).detach(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("model", [llama, qwen, qwen3])
def test_in_float32_they_drift_by_rounding_alone(model):
    predictor, answers = MaskPredictor(model().float(), MASK, PAD, block_size=SIZE), finished()
    chosen = likelihood.quadrature(answers)
    gap = estimate(predictor, answers, chosen, 8).each - one_by_one(predictor, answers, chosen)
    assert 0 < gap.abs().max() < 1e-5


def test_rows_that_cannot_be_padded_are_evaluated_without_it():
    predictor, answers = MaskPredictor(qwen3(), MASK, None, shift=True, block_size=SIZE), finished("eos")
    assert predictor.padded_form is None
    chosen = likelihood.quadrature(answers)
    found = estimate(predictor, answers, chosen, 5).each
    torch.testing.assert_close(found, one_by_one(predictor, answers, chosen).detach(), rtol=0, atol=1e-9)
    prompt, mask = answers.ids[:, : answers.prompt_length], answers.attention_mask[:, : answers.prompt_length]
    padding = MaskPredictor(qwen3(), MASK, PAD, shift=True, block_size=SIZE)
    one, other = (
        decode(p, prompt, build("random", LENGTH, 13, p), range(4), attention_mask=mask) for p in (predictor, padding)
    )
    assert torch.equal(one.completion, other.completion)


def test_a_block_sees_no_later_one_and_earlier_ones_as_they_are():
    predictor, answers = MaskPredictor(llama(), MASK, PAD, block_size=SIZE), finished()
    chosen = likelihood.one_step(answers, 0.0)
    before = estimate(predictor, answers, chosen, 4).each[0]
    changed = answers.ids.clone()
    changed[:, -6] = (changed[:, -6] + 1) % 13  # the fourth token of the answers
    after = estimate(predictor, replace(answers, ids=changed), chosen, 4).each[0]
    for row, prompt in enumerate(PROMPTS):
        number = (len(prompt) + torch.arange(LENGTH)) // SIZE
        same = (after[row] - before[row]).abs() < 1e-9
        assert same[number <= number[3]].sum() == (number <= number[3]).sum() - 1  # all but the changed token itself
        assert not same[number > number[3]].any()


def test_every_mask_of_the_answer_is_as_often_every_mask_of_its_blocks():
    predictor, one = MaskPredictor(llama(), MASK, PAD, block_size=SIZE), finished().of(torch.tensor([0]))
    one = replace(one, ids=one.ids[:, 2:-4], attention_mask=one.attention_mask[:, 2:-4], scored=one.scored[:, :5])
    assert one.blocks.tolist() == [[1, 1, 1, 2, 2]]

    def elbo(places):
        """Over k ~ U{1..m} and sets of k of m places, (m / k) sum of l_i, as one estimate."""
        masks = torch.tensor([m for m in product([False, True], repeat=len(places)) if any(m)])
        hidden = torch.zeros(len(masks), 1, one.ids.shape[1], dtype=torch.bool)
        hidden[:, 0, [one.prompt_length + place for place in places]] = masks
        count = masks.sum(1)
        weight = 1.0 / (count * torch.tensor([math.comb(len(places), int(k)) for k in count]))
        weight = weight[:, None, None] * hidden[:, :, one.prompt_length :]
        return estimate(predictor, one, masked_views.Views(hidden, weight, torch.ones(len(masks))), 64).seq.item()

    assert elbo(range(5)) == pytest.approx(elbo([0, 1, 2]) + elbo([3, 4]), abs=1e-5)  # weights are float32


@pytest.mark.parametrize(
    ("name", "shift"), with_shifts(["left_to_right", "threshold", "low_confidence", "entropy", "random"])
)
def test_a_trajectory_is_what_the_decoder_committed(name, shift):
    predictor, given = MaskPredictor(llama(), MASK, PAD, shift=shift, block_size=SIZE), finished()
    written = {"name": name, "proposal": {"temperature": 1.0}, "cache": "prefix"}
    if name == "threshold":
        written["committer"] = {"threshold": 0.5}
    width = given.prompt_length
    decoder, seeds = build(written, LENGTH, 13, predictor), [(0, row) for row in range(4)]
    rollout = decode(predictor, given.ids[:, :width], decoder, seeds, attention_mask=given.attention_mask[:, :width])
    answers = replace(given, ids=rollout.ids, steps=rollout.step_map)
    chosen = likelihood.trajectory(answers)
    assert len(chosen.weight) <= SIZE  # a step of all blocks at once
    found = estimate(predictor, answers, chosen, 8)
    torch.testing.assert_close(found.token, rollout.commit_logp, rtol=0, atol=1e-6)
    assert (chosen.scored.sum(0) == 1).all()
    if name == "left_to_right":
        exact = estimate(predictor, answers, likelihood.autoregressive(answers), 8)
        torch.testing.assert_close(exact.seq, rollout.commit_logp.sum(1), rtol=0, atol=1e-6)


def test_chances_of_all_answers_from_left_to_right_sum_to_one():
    torch.manual_seed(0)
    sizes = LlamaConfig(vocab_size=5, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
                        initializer_range=0.5)  # fmt: skip
    predictor = MaskPredictor(LlamaForCausalLM(sizes).double().eval(), 4, 3, block_size=2)
    every = torch.tensor(list(product(range(4), repeat=4)))
    ids = torch.cat([torch.tensor([[1, 2, 0]]).expand(len(every), -1), every], dim=1)
    ones = torch.ones_like(ids, dtype=torch.bool)
    addresses = [("every", i) for i in range(len(ids))]
    answers = Answers(ids=ids, attention_mask=ones, scored=ones[:, 3:], addresses=addresses, block_size=2)
    chosen = likelihood.autoregressive(answers)
    assert len(chosen.weight) == 2  # of blocks of 1, 2 and 1 tokens
    chances = estimate(predictor, answers, chosen, 512).seq.exp()
    assert chances.sum().item() == pytest.approx(1, abs=1e-6)
    assert chances.std() > 1e-3


def test_views_of_some_answers_are_those_of_the_others_left_out():
    answers, rows = finished(), torch.tensor([3, 1])
    whole, own = likelihood.quadrature(answers), likelihood.quadrature(answers.of(rows))
    for field in ("hidden", "weight", "view_weight", "blocks", "first"):
        assert torch.equal(getattr(whole.of(rows), field), getattr(own, field))


def test_steps_are_merged_and_told_apart_by_block():
    answers = finished().of(torch.tensor([2]))
    answers = replace(answers, steps=torch.tensor([[0, 1, 1, 2, 5, 6, 7, 8, 9]]))
    first = likelihood.trajectory(answers).first
    assert first.tolist() == [[4 + 0, 4 + 1, 4 + 1, 4 + 2, 8 + 0, 8 + 1, 8 + 2, 8 + 3, 12 + 0]]
    weights = aggregation.step_mean(answers.scored, torch.ones(1), first)  # eight steps, one of two tokens
    torch.testing.assert_close(weights, torch.tensor([[1, 0.5, 0.5, 1, 1, 1, 1, 1, 1]]) / 8)
    merged = likelihood.trajectory(answers, shrink=2).scored[:, 0]
    assert merged.tolist() == [[i in (0, 1, 2, 4, 5, 8) for i in range(9)], [i in (3, 6, 7) for i in range(9)]]
