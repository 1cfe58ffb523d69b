"""Trees of a decode: what answers share, and where they part."""

import pytest
import torch
from predictors import MASK, PAD, llama

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding import tree_growth
from flowgrpo.mdlm.decoding.decode import decode
from flowgrpo.mdlm.decoding.decoders import DECODERS, build
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from flowgrpo.mdlm.decoding.tokens.branching import Branching
from flowgrpo.mdlm.methods.trees import place_splits

EOS, LENGTH = 13, 8
PROMPT = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]]).repeat_interleave(4, 0)
SEEDS = [(0, "tree", group, leaf) for group in range(2) for leaf in range(4)]
PACED = [name for name in DECODERS if name not in ("trace_lock", "threshold", "factor", "ass", "eoser_ass")]


def decoder(name, **changes):
    return build({"name": name, "proposal": {"temperature": 1.0}, **changes}, LENGTH, EOS)


def grown(predictor, made, splits, **changes):
    places = place_splits(made, splits, "splits")
    return decode(predictor, PROMPT, made, SEEDS, branching=Branching(2, places, len(places)), **changes)


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


def test_steps_before_a_split_and_the_first_behind_it_are_evaluated_once():
    predictor = MaskPredictor(llama(), MASK, PAD)
    tree = grown(predictor, decoder("random"), [0.25, 0.6])
    assert predictor.evaluations == 2 * (2 * 1 + (1 + 2 * 2) + (2 + 2 * 4))
    assert tree.nfe.tolist() == [8] * 8


@pytest.mark.parametrize(("micro_batch", "calls"), [(1, 4), (3, 2), (4, 1), (6, 1), (16, 1)])
def test_a_canvas_is_evaluated_once_for_each_call_that_branches_of_it_need(micro_batch, calls):
    predictor, prompt = MaskPredictor(llama(), MASK, PAD), PROMPT[:4].repeat(2, 1)
    for places in (((0, 3),), ((0, 3), (0, 3))):  # no step lies between the last two
        branching = Branching(4, places[:1], 1) if len(places) == 1 else Branching(2, places, 2)
        before = predictor.evaluations
        decode(predictor, prompt, decoder("random"), SEEDS, branching=branching, micro_batch=micro_batch)
        first = calls if len(places) == 1 else 2 * (2 if micro_batch == 1 else 1)
        assert predictor.evaluations - before == 2 * (3 + first + 4 * 4)


def test_branches_of_a_canvas_share_a_call_if_they_fit_one():
    calls = {most: [(c.start, c.stop) for c in tree_growth.split_calls(torch.tensor([0, 0, 2, 2, 4]), most)]
             for most in (1, 3, 4, 9)}  # fmt: skip
    assert calls == {1: [(i, i + 1) for i in range(5)], 3: [(0, 2), (2, 5)], 4: [(0, 4), (4, 5)], 9: [(0, 5)]}


def test_answers_are_the_same_without_what_branches_share(predictor, monkeypatch):
    made = {
        "plain": decoder("random"),
        "guided": decoder("low_confidence", cfg_scale=0.5),
        "blocks": decoder("threshold", region={"block_length": 2}, committer={"threshold": 0.2}),
    }
    branching = {"plain": ((0, 2), (0, 5)), "guided": ((0, 2), (0, 5)), "blocks": ((1, 0), (2, 0))}
    found = []
    for apart in (False, True):
        if apart:
            monkeypatch.setattr(tree_growth.TreeGrowth, "_split", apart_from(tree_growth.TreeGrowth._split))
        before = predictor.evaluations
        trees = [
            decode(predictor, PROMPT, each, SEEDS, branching=Branching(2, branching[name], 2))
            for name, each in made.items()
        ]
        found.append((trees, predictor.evaluations - before))
    for shared, own in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(shared.ids, own.ids)
        assert torch.equal(shared.step_map, own.step_map)
        torch.testing.assert_close(shared.commit_logp, own.commit_logp, rtol=0, atol=1e-9)
    assert found[0][1] < found[1][1]


def apart_from(split):
    """Return a split whose branches share no evaluation and no cache of the row that led before."""

    def own(growth, *given):
        leads, _ = split(growth, *given)
        return leads, leads

    return own


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_a_tree_does_not_depend_on_the_rows_that_are_decoded_together(predictor, micro_batch):
    made = decoder("low_confidence", region={"block_length": 4})
    whole, parts = grown(predictor, made, [0.25, 0.6]), grown(predictor, made, [0.25, 0.6], micro_batch=micro_batch)
    assert torch.equal(whole.completion, parts.completion)
    assert torch.equal(whole.step_map, parts.step_map)


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_with_a_cache_branches_split_at_blocks_and_the_first_leaf_is_what_it_would_be_alone(predictor, cache):
    made = decoder("low_confidence", region={"block_length": 2}, cache=cache)
    tree, alone = grown(predictor, made, [0.3, 0.6]), decode(predictor, PROMPT[::4], made, SEEDS[::4])
    assert tree.branched.tolist() == [[2, 4]] * 8
    assert torch.equal(tree.completion[::4], alone.completion)
    torch.testing.assert_close(tree.commit_logp[::4], alone.commit_logp, rtol=0, atol=1e-6)


@pytest.mark.parametrize("cache", [None, "prefix", "dual"])
def test_branches_of_one_tree_may_wait_while_those_of_another_take_steps(predictor, cache):
    fixed = torch.full((8, LENGTH), MASK)
    fixed[:4, 2:4] = torch.tensor([1, 2])  # nothing to do in the block behind the split
    made, split = decoder("low_confidence", region={"block_length": 2}, cache=cache), Branching(4, ((1, 0),), 1)
    before = predictor.evaluations
    whole = decode(predictor, PROMPT, made, SEEDS, branching=split, fixed=fixed)
    assert predictor.evaluations - before == (2 + 1 + 3 * 4) + (2 + 1 + 5 * 4)
    apart = decode(predictor, PROMPT, made, SEEDS, branching=split, fixed=fixed, micro_batch=1)
    assert torch.equal(whole.ids, apart.ids)
    assert torch.equal(whole.step_map, apart.step_map)
    torch.testing.assert_close(whole.commit_logp, apart.commit_logp, rtol=0, atol=1e-9)


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_branches_of_a_cache_are_those_that_fill_it_by_themselves(cache, dtype, tolerance):
    predictor = MaskPredictor(llama().to(dtype), MASK, PAD)
    made = decoder("low_confidence", region={"block_length": 2}, cache=cache)
    shared, costs = [], []
    for micro_batch in (8, 1):  # of one row, so that no two branches share a call
        before = predictor.evaluations
        shared.append(grown(predictor, made, [0.3, 0.6], micro_batch=micro_batch))
        costs.append(predictor.evaluations - before)
    whole, apart = shared
    assert torch.equal(whole.ids, apart.ids)
    torch.testing.assert_close(whole.commit_logp, apart.commit_logp, rtol=0, atol=tolerance)
    assert costs == [2 * (2 + (1 + 2) + (2 + 3 * 4)), 2 * (2 + 2 * 2 + 4 * 4)]
    alone = decode(predictor, PROMPT[:1], made, SEEDS[:1])
    assert torch.equal(apart.commit_logp[0], alone.commit_logp[0])  # to the bit, in calls of one row


def in_blocks(predictor, cache, **changes):
    written = {"name": "low_confidence", "proposal": {"temperature": 1.0}, "cache": cache, **changes}
    return build(written, 14, EOS, predictor)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("micro_batch", [1, 3, 8])
def test_branches_of_a_block_causal_model_are_those_without_a_cache(dtype, tolerance, micro_batch):
    predictor = MaskPredictor(llama().to(dtype), MASK, PAD, block_size=4)
    prompt = torch.tensor([[PAD, PAD, 3, 1, 4, 1], [5, 9, 2, 6, 5, 3]]).repeat_interleave(4, 0)
    options = {"attention_mask": prompt != PAD, "branching": Branching(2, ((1, 0), (3, 0)), 2)}
    plain = decode(predictor, prompt, in_blocks(predictor, None), SEEDS, **options)
    cached = decode(predictor, prompt, in_blocks(predictor, "prefix"), SEEDS, micro_batch=micro_batch, **options)
    assert torch.equal(plain.ids, cached.ids)
    assert torch.equal(plain.branched, cached.branched)
    torch.testing.assert_close(plain.commit_logp, cached.commit_logp, rtol=0, atol=tolerance)
    for split, alike in ((0, 4), (1, 2)):
        known = plain.step_map < plain.branched[:, split, None]
        assert known.any(1).all()
        leads = torch.arange(8) // alike * alike
        assert torch.equal(cached.completion[known], cached.completion[leads][known])
    assert len({tuple(row) for row in cached.completion.tolist()}) == 8


def test_a_branch_of_a_block_causal_model_goes_on_from_the_cache_of_its_parent():
    predictor, fed = MaskPredictor(llama(), MASK, PAD, block_size=4), []
    predictor.model.register_forward_pre_hook(lambda module, given: fed.append(tuple(given[0].shape)))
    before, prompt, made = predictor.evaluations, torch.arange(1, 9).expand(4, -1), in_blocks(predictor, "prefix")
    tree = decode(predictor, prompt, made, SEEDS[:4], branching=Branching(2, ((1, 0), (2, 0)), 2), micro_batch=2)
    # The prompt with the first block; then each block: its first step with the block before, the others alone.
    part = [(1, 8), *[(2, 4)] * 3]  # the first step of two siblings in one row
    last = [(1, 8), *[(2, 4)] * 3, (2, 6), (2, 2)]  # the last block has two tokens
    assert fed == [(1, 12), *[(1, 4)] * 3, *part, *last, *last]
    assert predictor.evaluations - before == 4 + (1 + 3 * 2) + 2 * (1 + 3 * 2 + 2 * 2)
    alone = decode(predictor, prompt[:1], made, SEEDS[:1])
    assert torch.equal(tree.completion[:1], alone.completion)


def test_branches_that_finish_a_block_at_different_steps_keep_their_cache():
    predictor, fed = MaskPredictor(llama(), MASK, PAD, block_size=4), []
    predictor.model.register_forward_pre_hook(lambda module, given: fed.append(given[0].shape[1]))
    made = in_blocks(predictor, "prefix", name="threshold", committer={"threshold": 0.3})
    options = {"branching": Branching(4, ((1, 0),), 1)}
    tree = decode(predictor, torch.arange(1, 9).expand(4, -1), made, SEEDS[:4], **options)
    assert len({int(row.max()) for row in tree.step_map[:, :8]}) > 1
    assert fed[0] == 12
    assert max(fed[1:]) == 8  # the block and the one before it, never again the prompt
    plain = in_blocks(predictor, None, name="threshold", committer={"threshold": 0.3})
    assert torch.equal(tree.ids, decode(predictor, torch.arange(1, 9).expand(4, -1), plain, SEEDS[:4], **options).ids)


def test_a_block_causal_model_splits_at_its_own_blocks():
    predictor = MaskPredictor(llama(), MASK, PAD, block_size=4)
    made = in_blocks(predictor, "prefix")
    assert place_splits(made, [0.25, 0.5], "splits") == ((1, 0), (2, 0))


def test_scores_that_decide_the_steps_split_at_blocks(predictor):
    made = decoder("threshold", region={"block_length": 2}, committer={"threshold": 0.2})
    assert place_splits(made, [0.25, 0.5], "splits") == ((1, 0), (2, 0))
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
        place_splits(decoder("random"), splits, "splits")


def test_one_block_whose_steps_scores_decide_cannot_split():
    with pytest.raises(InputError, match="inside a decode of 1 blocks"):
        place_splits(decoder("threshold"), [0.5], "splits")


PLACES = ((0, 1), (0, 3), (0, 5), (0, 6))


@pytest.mark.parametrize(("entropy", "expected"), [(0.0, [1, 3]), (100.0, [5, 6])])
def test_without_a_choice_the_first_or_the_last_places_split(predictor, entropy, expected):
    made = decoder("random")
    tree = decode(predictor, PROMPT, made, SEEDS, branching=Branching(2, PLACES, 2, entropy))
    plain = Branching(2, tuple((0, step) for step in expected), 2)
    assert tree.branched.tolist() == [expected] * 8
    assert torch.equal(tree.completion, decode(predictor, PROMPT, made, SEEDS, branching=plain).completion)


def test_a_branch_splits_where_the_model_is_unsure_of_its_canvas(predictor):
    made = decoder("random")
    seen = []
    for micro_batch in (None, 1):
        branching = Branching(2, PLACES, 2, 1.3)
        tree = decode(predictor, PROMPT, made, SEEDS, branching=branching, micro_batch=micro_batch)
        seen.append(tree.branched.tolist())
        for leaf, steps in enumerate(tree.branched.tolist()):
            before = 0
            for number, step in enumerate(steps):
                for candidate in (place for _, place in PLACES if before < place <= step):
                    canvas = tree.canvas(candidate, MASK)[leaf : leaf + 1]
                    each = torch.special.entr(predictor.logits(canvas, None)[0].float().softmax(-1)).sum(-1)
                    unsure = float(each[canvas[0] == MASK].mean().detach()) >= 1.3
                    forced = sum(place >= candidate for _, place in PLACES) <= 2 - number
                    assert (unsure or forced) == (candidate == step)
                before = step
    assert seen[0] == seen[1]
    assert len({tuple(each) for each in seen[0]}) > 1  # branches choose for themselves


def test_rows_that_are_no_whole_trees_are_refused(predictor):
    with pytest.raises(InputError, match="8 rows are no whole trees of 3 leaves"):
        decode(predictor, PROMPT, decoder("random"), SEEDS, branching=Branching(3, ((0, 2),), 1))
