"""Trees of a decode: what answers share, and where they part."""

import pytest
import torch
from predictors import MASK, PAD, llama

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.branching import Branching, place_splits
from flowgrpo.mdlm.decoding.decode import decode
from flowgrpo.mdlm.decoding.decoders import DECODERS, build
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor

EOS, LENGTH = 13, 8
PROMPT = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]]).repeat_interleave(4, 0)
SEEDS = [(0, "tree", group, leaf) for group in range(2) for leaf in range(4)]
PACED = [name for name in DECODERS if name not in ("trace_lock", "threshold", "factor", "ass", "eoser_ass")]


def decoder(name, **changes):
    return build({"name": name, "proposal": {"temperature": 1.0}, **changes}, LENGTH, EOS)


def grown(predictor, made, splits, **changes):
    return decode(predictor, PROMPT, made, SEEDS, branching=place_splits(made, 2, splits, "splits"), **changes)


@pytest.mark.parametrize("name", PACED)
def test_the_first_leaf_is_what_it_would_be_alone(predictor, name):
    made = decoder(name)
    tree = grown(predictor, made, [0.25, 0.6])
    alone = decode(predictor, PROMPT[::4], made, SEEDS[::4])
    assert torch.equal(tree.completion[::4], alone.completion)
    assert torch.equal(tree.step_map[::4], alone.step_map)
    torch.testing.assert_close(tree.commit_logp[::4], alone.commit_logp, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["low_confidence", "random", "left_to_right", "origin"])
def test_leaves_share_what_was_committed_before_they_part(predictor, name):
    tree = grown(predictor, decoder(name), [0.25, 0.6])
    assert tree.branched.tolist() == [[2, 5]] * 8
    for level, alike in enumerate((4, 2)):
        shared = tree.step_map < tree.branched[:, level, None]
        for first in range(0, 8, alike):
            for leaf in range(first, first + alike):
                assert torch.equal(shared[leaf], shared[first])
                for each in (tree.completion, tree.step_map, tree.commit_logp):
                    assert torch.equal(each[leaf][shared[leaf]], each[first][shared[first]])
    assert len({tuple(row) for row in tree.completion.tolist()}) > 5


def test_a_shared_step_is_evaluated_once():
    predictor = MaskPredictor(llama(), MASK, PAD)
    tree = grown(predictor, decoder("random"), [0.25, 0.6])
    assert predictor.evaluations == 2 * (2 * 1 + 3 * 2 + 3 * 4)
    assert tree.nfe.tolist() == [8] * 8


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_a_tree_does_not_depend_on_the_rows_that_are_decoded_together(predictor, micro_batch):
    made = decoder("low_confidence", region={"block_length": 4})
    whole, parts = grown(predictor, made, [0.25, 0.6]), grown(predictor, made, [0.25, 0.6], micro_batch=micro_batch)
    assert torch.equal(whole.completion, parts.completion)
    assert torch.equal(whole.step_map, parts.step_map)


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_a_cache_changes_no_shape(predictor, cache):
    made = decoder("low_confidence", region={"block_length": 4}, cache=cache)
    tree = grown(predictor, made, [0.25, 0.6])
    assert tree.branched.tolist() == [[2, 5]] * 8
    assert not (tree.completion == MASK).any()


def test_scores_that_decide_the_steps_split_at_blocks(predictor):
    made = decoder("threshold", region={"block_length": 2}, committer={"threshold": 0.2})
    assert place_splits(made, 2, [0.25, 0.5], "splits") == Branching(2, ((1, 0), (2, 0)))
    tree = grown(predictor, made, [0.25, 0.5])
    first = tree.completion[:, :2]
    assert all(torch.equal(first[leaf], first[leaf - leaf % 4]) for leaf in range(8))
    assert (tree.branched[:, 0] == tree.step_map[:, :2].amax(1) + 1).all()


def test_a_block_begins_with_the_masks_it_had_although_it_split(predictor):
    """Steps of an even decoder take as many tokens as without a split inside the block."""
    made = decoder("random", steps=3)
    tree, alone = grown(predictor, made, [0.4]), decode(predictor, PROMPT, made, SEEDS)
    count = [torch.bincount(row, minlength=3).tolist() for row in (*tree.step_map, *alone.step_map)]
    assert count == [[3, 3, 2]] * 16


@pytest.mark.parametrize(
    ("splits", "nearest"), [([0.01], "take 0.125 or 0.5 or 0.875"), ([0.5, 0.5], ""), ([0.6, 0.2], "")]
)
def test_splits_that_are_no_places_are_refused(splits, nearest):
    with pytest.raises(InputError, match=f"splits: .* are not ascending places inside a decode of 8 steps.*{nearest}"):
        place_splits(decoder("random"), 2, splits, "splits")


def test_one_block_whose_steps_scores_decide_cannot_split():
    with pytest.raises(InputError, match="inside a decode of 1 blocks"):
        place_splits(decoder("threshold"), 2, [0.5], "splits")


def test_rows_that_are_no_whole_trees_are_refused(predictor):
    with pytest.raises(InputError, match="8 rows are no whole trees of 3 leaves"):
        decode(predictor, PROMPT, decoder("random"), SEEDS, branching=Branching(3, ((0, 2),)))
