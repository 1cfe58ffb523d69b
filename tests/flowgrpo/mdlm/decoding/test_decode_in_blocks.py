"""Decoding of block-causal models: LLaDA2's pipeline, padding, and the cache that is exact."""

import warnings
from functools import cache
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from diffusers import BlockRefinementScheduler, LLaDA2Pipeline
from predictors import MASK, PAD, llama, qwen, qwen3, random_table

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.decode import decode
from flowgrpo.mdlm.decoding.decoders import build
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor

EOS, SIZE, LENGTH = 13, 4, 8
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5], [8, 9, 7, 9, 3, 2, 3]]  # each ends elsewhere in its block
SEEDS = [(0, "block", row) for row in range(4)]


@pytest.fixture(scope="module")
def predictor():
    return MaskPredictor(llama(), MASK, PAD, block_size=SIZE)


def padded(rows):
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])


class Released(torch.nn.Module):
    """A model as LLaDA2's code calls it: blocks by a mask of tril(ones) x block, the mask token never likely."""

    def __init__(self, model):
        super().__init__()
        self.model, self.device = model, torch.device("cpu")

    def forward(self, ids, attention_mask, position_ids):
        blocks = torch.ones(ids.shape[1] // SIZE, ids.shape[1] // SIZE).tril()
        seen = torch.kron(blocks, torch.ones(SIZE, SIZE))[None] * attention_mask[:, None]
        mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(seen == 0, torch.finfo(torch.float64).min)
        logits = self.model(ids, attention_mask=mask[:, None], position_ids=position_ids).logits
        logits[..., MASK] = -torch.inf
        return SimpleNamespace(logits=logits)


@pytest.fixture
def pipe(predictor):
    pipe = LLaDA2Pipeline(Released(predictor.model), BlockRefinementScheduler())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_a_cache_is_given_by_the_name_that_the_model_has_for_it(predictor):
    """Transformers warns of the older one in every call, and will refuse it."""
    ids, mask = padded(PROMPTS)
    written = {"name": "block_refinement", "steps": 4, "cache": "prefix"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode(predictor, ids, build(written, LENGTH, EOS, predictor), attention_mask=mask)


@pytest.mark.parametrize(("steps", "threshold"), [(4, 0.5), (2, 0.5), (4, 2.0), (1, 0.9)])
def test_tokens_are_those_of_the_pipeline_of_llada2(predictor, pipe, steps, threshold):
    ids, mask = padded(PROMPTS)
    compared = 0
    for length in (8, 11, 13, 14):
        if length * steps % SIZE:
            continue
        written = {"name": "block_refinement", "committer": {"threshold": threshold}, "steps": length * steps // SIZE}
        rollout = decode(predictor, ids, build(written, length, EOS, predictor), attention_mask=mask)
        for row, prompt in enumerate(PROMPTS):
            if (len(prompt) + length) % SIZE:  # else the pipeline fills the last block up with tokens that nobody sees
                continue
            out = pipe(input_ids=torch.tensor([prompt]), gen_length=length, block_length=SIZE, num_inference_steps=steps,
                       threshold=threshold, editing_threshold=None, eos_early_stop=False, mask_token_id=MASK,
                       output_type="seq")  # fmt: skip
            assert torch.equal(rollout.completion[row], out.sequences[0])
            compared += 1
    assert compared >= (1 if steps == 1 else 2)


def test_an_answer_that_ends_is_that_of_the_pipeline_up_to_its_end(predictor, pipe):
    prompts = [[a, b, a, c] for a in (0, 3, 7) for b in (1, 5, 8) for c in (2, 6)]
    written = {"name": "block_refinement", "committer": {"threshold": 0.5}, "eos_early_stop": True}
    rollout = decode(predictor, torch.tensor(prompts), build(written, 16, EOS, predictor))
    ended = 0
    for row, prompt in enumerate(prompts):
        out = pipe(input_ids=torch.tensor([prompt]), gen_length=16, block_length=SIZE, num_inference_steps=SIZE,
                   threshold=0.5, editing_threshold=None, eos_token_id=EOS, mask_token_id=MASK,
                   output_type="seq").sequences[0]  # fmt: skip
        end = (rollout.completion[row] == EOS).nonzero()[:, 0]
        whole = int(end[0]) + 1 if len(end) else 16
        assert torch.equal(rollout.completion[row, :whole], out[:whole])
        ended += whole < 16
    assert ended > 2


def alone(model, row, canvases, end, shift):
    """Log-probabilities (N, T, V) of an unpadded row with each canvas, whose blocks after `end` do not exist yet."""
    ids = torch.tensor([row + canvas[: end - len(row)] for canvas in canvases])
    block = torch.arange(ids.shape[1]) // SIZE
    mask = torch.zeros(len(block), len(block), dtype=torch.float64)
    mask[block[:, None] < block] = torch.finfo(torch.float64).min
    logits = model(ids, attention_mask=mask.expand(len(ids), 1, -1, -1)).logits
    logits[..., MASK] = -torch.inf
    if shift:
        logits = torch.cat([logits[:, :1], logits[:, :-1]], dim=1)
    return logits.log_softmax(-1)


@cache
def shifting(shift):
    """A predictor whose logits are shifted, or not."""
    return MaskPredictor(qwen3(), MASK, PAD, shift=shift, block_size=SIZE)


NAMES = ("low_confidence", "entropy", "threshold", "random", "scheduled", "origin")
# In a plain run; a decoder is given logits that are shifted already, and knows of no cache.
PLAIN = [(name, False, None) for name in NAMES if name != "threshold"]
PLAIN += [("threshold", False, "prefix"), ("random", False, "prefix"), ("low_confidence", True, "prefix")]
CASES = [
    pytest.param(*case, marks=() if case in PLAIN else pytest.mark.zoo)
    for case in product(NAMES, (False, True), (None, "prefix"))
]


@pytest.mark.parametrize(("name", "shift", "cache"), CASES)
def test_tokens_are_drawn_given_finished_blocks_in_any_batch(name, shift, cache):
    predictor = shifting(shift)
    before = predictor.evaluations
    written = {"name": name, "proposal": {"temperature": 1.0}, "cache": cache}
    if name == "threshold":
        written["committer"] = {"threshold": 0.5}
    if name == "random":
        written["region"] = {"block_length": 2}  # halves of the model's blocks
        written["steps"] = LENGTH
    decoder, (ids, mask) = build(written, LENGTH, EOS, predictor), padded(PROMPTS)
    whole = decode(predictor, ids, decoder, SEEDS, attention_mask=mask)
    parts = decode(predictor, ids, decoder, SEEDS, attention_mask=mask, micro_batch=3)
    for row, prompt in enumerate(PROMPTS):
        own = decode(predictor, torch.tensor([prompt]), decoder, SEEDS[row : row + 1])
        for other, at in ((own, 0), (parts, row)):
            assert torch.equal(other.completion[at], whole.completion[row])
            assert torch.equal(other.step_map[at], whole.step_map[row])
            torch.testing.assert_close(other.commit_logp[at], whole.commit_logp[row], rtol=0, atol=1e-9)
        steps = whole.step_map[row]
        region = 2 if name == "random" else SIZE
        number = (len(prompt) + torch.arange(LENGTH)) // region
        assert (steps[1:][number[1:] > number[:-1]] > steps[:-1][number[1:] > number[:-1]]).all()
        ends = (len(prompt) + torch.arange(LENGTH)) // SIZE * SIZE + SIZE
        for end in ends.unique():
            places = (ends == end).nonzero()[:, 0].tolist()
            canvases = [whole.completion[row].masked_fill(steps >= steps[place], MASK).tolist() for place in places]
            expected = alone(predictor.model, prompt, canvases, int(end), shift)
            for place, own in zip(places, expected, strict=True):
                found = own[len(prompt) + place, whole.completion[row, place]]
                torch.testing.assert_close(whole.commit_logp[row, place], found, rtol=0, atol=1e-9)
    assert predictor.evaluations - before == int(whole.nfe.sum()) * 3


@pytest.mark.parametrize("model", [llama, qwen, qwen3])
def test_in_float32_a_cache_moves_no_log_probability_by_more_than_rounding(model):
    """Of a predictor of its own class, with prompts that end elsewhere in their blocks."""
    predictor, (ids, mask) = MaskPredictor(model().float(), MASK, PAD, block_size=SIZE), padded(PROMPTS)
    found = []
    for kind in (None, "prefix"):
        written = {
            "name": "threshold",
            "committer": {"threshold": 0.4},
            "proposal": {"temperature": 1.0},
            "cache": kind,
        }
        found.append(decode(predictor, ids, build(written, 12, EOS, predictor), SEEDS, attention_mask=mask))
    plain, cached = found
    assert torch.equal(plain.ids, cached.ids)
    assert torch.equal(plain.step_map, cached.step_map)
    torch.testing.assert_close(plain.commit_logp, cached.commit_logp, rtol=0, atol=1e-5)


def test_a_cached_decode_feeds_two_blocks_at_most():
    predictor, fed = MaskPredictor(llama(), MASK, PAD, block_size=SIZE), []
    predictor.model.register_forward_pre_hook(lambda module, given: fed.append(given[0].shape[1]))
    decoder = build({"name": "random", "cache": "prefix"}, 14, EOS, predictor)
    decode(predictor, torch.tensor([[1, 2, 3, 4, 5, 6]]), decoder, SEEDS[:1])
    # the prompt with the first block; then of each block its first step with the block before, the others alone
    assert fed == [8, 4, *[8, 4, 4, 4] * 3]


def test_a_row_that_waits_is_taken_up_again_with_its_cache(predictor):
    ids, mask = padded([[3, 1, 4, 1], [5, 9, 2, 6]])
    fixed = torch.full((2, 12), MASK)
    fixed[0, 4:8] = torch.tensor([1, 2, 3, 4])  # the first row has nothing to do in the second block
    found = []
    for kind in (None, "prefix"):
        decoder = build({"proposal": {"temperature": 1.0}, "cache": kind}, 12, EOS, predictor)
        found.append(decode(predictor, ids, decoder, SEEDS[:2], attention_mask=mask, fixed=fixed))
    exact, cached = found
    assert torch.equal(exact.ids, cached.ids)
    torch.testing.assert_close(exact.commit_logp, cached.commit_logp, rtol=0, atol=1e-9)


def test_the_blocks_of_a_decoder_are_those_of_its_model(predictor):
    for written, message in (
        ({"region": {"block_length": 3}}, "blocks of 3 tokens are not equal parts of the model's, which have 4"),
        ({"region": {"name": "ascending"}}, "ascending blocks are not this model's own"),
        ({"cache": "dual"}, "no block sees the later ones of this model, take prefix"),
        ({"steps": 5}, "5 for 12 tokens are not a whole number for a block of 4"),
    ):
        with pytest.raises(InputError, match=message):
            build({"name": "low_confidence", **written}, 12, EOS, predictor)
    larger = build({"name": "low_confidence", "region": {"block_length": 8}}, 16, EOS, predictor)
    assert larger.region == build("low_confidence", 16, EOS, predictor).region
    for model, size in ((predictor, None), (MaskPredictor(llama(), MASK), 4)):
        with pytest.raises(InputError, match="hand build the predictor"):
            decode(model, torch.tensor([PROMPTS[0]]), build("low_confidence", 12, block_size=size))


def test_a_model_that_cannot_attend_in_blocks_is_refused():
    with pytest.raises(InputError, match="a 4-d attention mask and position_ids"):
        MaskPredictor(random_table(20).model, MASK, block_size=4)
    inner = qwen()
    inner.config.is_causal = False

    def deaf(ids, attention_mask, position_ids=None):
        return inner(ids, attention_mask=torch.zeros_like(attention_mask), position_ids=position_ids)

    with pytest.raises(InputError, match="the first block sees the second"):
        MaskPredictor(deaf, MASK, PAD, block_size=4)
