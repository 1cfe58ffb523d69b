"""Evaluations of a tree's rollout: those that a decode takes."""

import pytest
import torch
from predictors import MASK, PAD, llama

from flowgrpo.mdlm.decoding.decode import decode
from flowgrpo.mdlm.decoding.decoders import build
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from flowgrpo.mdlm.decoding.tokens.branching import Branching
from flowgrpo.mdlm.methods.trees import place_splits
from flowgrpo.mdlm.planning.decoder_steps import count_decoder_steps
from flowgrpo.mdlm.planning.tree_cost import count_rollout

EOS, LENGTH, SIZE = 13, 8, 4
PAIRS = {"name": "low_confidence", "region": {"block_length": 2}, "proposal": {"temperature": 1.0}}
DECODERS = {
    "plain": {**PAIRS, "region": {}},
    "guided": {**PAIRS, "cfg_scale": 0.5},
    "prefix": {**PAIRS, "cache": "prefix"},
    "dual": {**PAIRS, "cache": "dual"},
    "four steps": {**PAIRS, "steps": 4},
}


def spent(predictor, decoder, split, rows, *, prompt=3):
    """Evaluations of two trees."""
    before, count = predictor.evaluations, 2 * split.leaves
    ids = torch.arange(1, prompt + 1).expand(count, -1)
    decode(predictor, ids, decoder, [(0, row) for row in range(count)], branching=split, micro_batch=rows)
    return predictor.evaluations - before


@pytest.mark.parametrize("rows", [1, 2, 3, 16])
@pytest.mark.parametrize(("factor", "splits"), [(2, [0.25, 0.5]), (3, [0.5])])
@pytest.mark.parametrize("name", DECODERS)
def test_a_tree_takes_the_evaluations_that_were_counted(name, factor, splits, rows):
    predictor, decoder = MaskPredictor(llama(), MASK, PAD), build(DECODERS[name], LENGTH, EOS)
    split = Branching(factor, place_splits(decoder, splits, "splits"), len(splits))
    counted, exact = count_rollout(count_decoder_steps(decoder), split, rows)
    assert exact
    assert 2 * counted == spent(predictor, decoder, split, rows)


@pytest.mark.parametrize("written", [{}, {"cache": "prefix"}, {"region": {"block_length": 2}, "cfg_scale": 0.5}])
def test_a_tree_of_blocks_takes_the_most_where_its_prompt_ends_at_the_worst_place(written):
    predictor = MaskPredictor(llama(), MASK, PAD, block_size=SIZE)
    decoder = build({"name": "low_confidence", "proposal": {"temperature": 1.0}, **written}, LENGTH, EOS, predictor)
    split = Branching(2, place_splits(decoder, [0.5], "splits"), 1)
    counted, exact = count_rollout(count_decoder_steps(decoder), split, 16)
    each = [spent(predictor, decoder, split, 16, prompt=prompt) for prompt in range(4, 8)]
    assert 2 * counted == max(each) > min(each)
    assert not exact


def test_what_a_split_saves():
    """Of four branches behind four of eight steps, in calls that hold all of them, two or one."""
    walk, split = count_decoder_steps(build(DECODERS["plain"], LENGTH, EOS)), Branching(4, ((0, 4),), 1)
    assert [count_rollout(walk, split, rows)[0] for rows in (8, 4, 3, 2, 1)] == [17, 17, 18, 18, 20]
