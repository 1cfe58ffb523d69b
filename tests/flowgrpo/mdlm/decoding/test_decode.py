import math
import re
from dataclasses import replace

import pytest
import torch
from diffusers import BlockRefinementScheduler
from predictors import MASK, PAD, VOCAB, llama, qwen, random_table

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.decode import decode
from flowgrpo.mdlm.decoding.decoders import DECODERS, build
from flowgrpo.mdlm.decoding.predictor import MaskPredictor
from flowgrpo.mdlm.decoding.proposals import Proposed
from flowgrpo.mdlm.decoding.regions import ascending, ascending_sizes
from flowgrpo.mdlm.decoding.step import DecodeStep

EOS, LENGTH = 13, 8
NAMES = [name for name in DECODERS if name != "trace_lock"]  # it needs a controller, see test_trace_lock.py
PROMPT = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8]])
SEEDS = [(0, "decode", group) for group in range(3)]


def spec(name):
    written = {"name": name, "proposal": {"temperature": 1.0}}
    if name in ("threshold", "factor", "block_refinement", "low_confidence"):
        written["region"] = {"block_length": 4}
    if name in ("threshold", "block_refinement"):
        written["committer"] = {"threshold": 0.6}
    if name in ("low_confidence", "random", "eoser", "block_refinement", "origin", "entropy"):
        written["steps"] = 4
    return written


@pytest.fixture(scope="module")
def predictor():
    return MaskPredictor(llama(), MASK, PAD)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_depends_neither_on_its_batch_nor_its_place_nor_its_padding(predictor, name):
    decoder = build(spec(name), LENGTH, EOS)
    whole = decode(predictor, PROMPT, decoder, SEEDS)
    order = torch.tensor([2, 0, 1])
    padded = torch.cat([torch.full((3, 6), PAD), PROMPT], dim=1)[order]
    mask = (torch.arange(10) >= 6).expand(3, -1)
    moved = decode(predictor, padded, decoder, [SEEDS[i] for i in order], attention_mask=mask)
    alone = [decode(predictor, PROMPT[i : i + 1], decoder, SEEDS[i : i + 1]) for i in range(3)]
    in_parts = decode(predictor, PROMPT, decoder, SEEDS, micro_batch=2)
    for i in range(3):
        place = order.tolist().index(i)
        for other, row in ((alone[i], 0), (moved, place), (in_parts, i)):
            assert torch.equal(other.completion[row], whole.completion[i])
            assert torch.equal(other.step_map[row], whole.step_map[i])
            assert other.nfe[row] == whole.nfe[i]
            torch.testing.assert_close(other.commit_logp[row], whole.commit_logp[i], rtol=0, atol=1e-9)
    assert len({tuple(row) for row in whole.completion.tolist()}) == 3


@pytest.mark.parametrize("name", NAMES)
def test_commit_log_probs_are_those_of_the_canvas_that_the_step_map_tells(predictor, name):
    rollout = decode(predictor, PROMPT, build(spec(name), LENGTH, EOS), SEEDS)
    assert not (rollout.ids == MASK).any()
    assert torch.equal(rollout.nfe, rollout.steps)
    expected = torch.full(rollout.step_map.shape, torch.nan, dtype=torch.float64)
    for s in range(int(rollout.steps.max())):
        canvas = rollout.canvas(s, MASK)
        assert torch.equal(canvas[:, 4:] == MASK, rollout.step_map >= s)
        log_probs = predictor.logits(canvas)[:, 4:].log_softmax(-1)
        log_prob = log_probs.gather(-1, rollout.completion[..., None])[..., 0]
        expected[rollout.step_map == s] = log_prob[rollout.step_map == s]
    torch.testing.assert_close(rollout.commit_logp, expected.detach(), rtol=0, atol=1e-9)


def test_left_to_right_is_the_autoregressive_likelihood(predictor):
    rollout = decode(predictor, PROMPT, build(spec("left_to_right"), LENGTH), SEEDS)
    assert (rollout.step_map == torch.arange(LENGTH)).all()
    total = 0
    for t in range(LENGTH):
        ids = torch.cat([rollout.ids[:, : 4 + t], torch.full((3, LENGTH - t), MASK)], dim=1)
        total = total + predictor.logits(ids)[:, 4 + t].log_softmax(-1)[torch.arange(3), rollout.ids[:, 4 + t]]
    torch.testing.assert_close(rollout.commit_logp.sum(1), total.detach(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_fixed_tokens_stay_and_are_seen(predictor, name):
    fixed = torch.full((3, LENGTH), MASK)
    fixed[:, 2], fixed[0, 4:] = 7, 1
    decoder = build(spec(name), LENGTH, EOS)
    rollout = decode(predictor, PROMPT, decoder, SEEDS, fixed=fixed)
    given = fixed != MASK
    assert torch.equal(rollout.completion[given], fixed[given])
    assert torch.equal(rollout.step_map == -1, given)
    assert (rollout.commit_logp[given] == 0).all()
    assert torch.equal(rollout.canvas(0, MASK)[:, 4:], fixed)
    free = decode(predictor, PROMPT, decoder, SEEDS)
    assert not torch.equal(free.completion[~given], rollout.completion[~given])


@pytest.mark.parametrize("length", [1, 2, 3, 16, 100, 128, 256])
def test_steps_of_ascending_size_add_up(length):

    sizes = [size for block in ascending_sizes(length) for size in block]
    assert sum(sizes) == length
    assert sizes[:-1] == [2**i for i in range(len(sizes) - 1)]
    known = {100: [1, 2, 4, 8, 16, 69], 128: [1, 2, 4, 8, 16, 32, 65], 256: [1, 2, 4, 8, 16, 32, 64, 129]}
    assert sizes == known.get(length, sizes)
    if length == 128:
        assert ascending_sizes(128, 4) == ((1, 2, 4, 8), (16,), (32,), (65,))
        assert ascending(128, 4).ends == (15, 31, 63, 128)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_logits_that_are_not_numbers_end_too(monkeypatch, name, temperature):
    """Even where the mask is the last token of the vocabulary, which a search among NaN comes to."""
    predictor, calls = MaskPredictor(llama(), VOCAB - 1, PAD), []
    real = MaskPredictor.logits_and_hidden

    def broken(self, *arguments, **options):
        calls.append(1)
        assert len(calls) <= 2 * LENGTH
        logits, hidden = real(self, *arguments, **options)
        return logits.where(logits.isinf(), torch.nan), hidden

    monkeypatch.setattr(MaskPredictor, "logits_and_hidden", broken)
    decoder = build({**spec(name), "proposal": {"temperature": temperature}}, LENGTH, EOS)
    rollout = decode(predictor, PROMPT, decoder, SEEDS)
    assert calls
    assert not (rollout.completion == VOCAB - 1).any()
    assert not rollout.commit_logp.isfinite().any()


def test_the_end_is_suppressed_less_and_less():
    (linear,) = build({"name": "eoser", "steps": 5}, 10, EOS).modifiers
    assert [linear.gamma(s, 5) for s in range(5)] == pytest.approx([0.4, 0.55, 0.7, 0.85, 1.0])
    (single,) = build({"name": "eoser", "steps": 1}, 10, EOS).modifiers
    assert single.gamma(0, 1) == 1
    (steep,) = build("eoser_ass", 256, EOS).modifiers
    known = [0.014, 0.022, 0.037, 0.068, 0.130, 0.254, 0.501, 0.996]
    assert [steep.gamma(s, 8) for s in range(8)] == pytest.approx(known, abs=5e-4)


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
        in_block=number,
        block_masks=width,
        block=0,
        start=0,
        open=ids == MASK,
        ids=ids,
        attention_mask=ids == MASK,
        prompt=0,
        seeds=["row"],
    )
    return decoder.committer(replace(step, **changes), scores)[0].nonzero()[:, 0].tolist()


def test_factor_takes_the_most_that_are_sure_together():
    # with factor 1 the n-th largest has to reach 1 - 1 / (n + 1): 1/2, 2/3, 3/4, 4/5
    assert committed("factor", [0.7, 0.76, 0.75, 0.9]) == [1, 2, 3]
    assert committed("factor", [0.81, 0.8, 0.85, 0.9]) == [0, 1, 2, 3]
    assert committed("factor", [0.3, 0.4, 0.1, 0.2]) == [1]
    assert committed({"name": "factor", "committer": {"factor": 2.0}}, [0.35, 0.4, 0.1, 0.2]) == [0, 1]  # 0, 1/3, 1/2


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


def test_tokens_are_drawn_from_the_tempered_and_filtered_distribution():
    rows = 4000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf], dtype=torch.float64)

    def model(ids):
        bend = (ids == 0)[:, [-1]].double()[..., None] * 1e-3  # so that the probe sees a later token
        return logits.where(torch.arange(5) != 4, 0.0) + bend * torch.arange(5)

    predictor = MaskPredictor(lambda ids: model(ids).expand(-1, ids.shape[1], -1), 4)
    for options, kept in (({}, 4), ({"top_k": 2}, 2), ({"top_p": 0.85}, 3), ({"top_p": 0.7}, 2), ({"top_p": 0.05}, 1)):
        decoder = build({"name": "random", "proposal": {"temperature": 2.0, **options}}, 1)
        rollout = decode(predictor, torch.ones(rows, 1).long(), decoder, range(rows))
        expected = torch.zeros(5, dtype=torch.float64)
        expected[:kept] = (logits[:kept] / 2).softmax(0)  # of temperature 2: .455 .276 .167 .102
        found = rollout.completion[:, 0].bincount(minlength=5) / rows
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.035)
        torch.testing.assert_close(rollout.commit_logp[:, 0], expected[rollout.completion[:, 0]].log())


def test_noisy_scores_are_draws_without_replacement():

    rows, scores = 4000, torch.tensor([0.9, 0.5, 0.1], dtype=torch.float64)
    decoder = build({"name": "scheduled", "modifiers": [{"name": "gumbel", "temperature": 0.5}]}, 3)
    (noisy,), frame = decoder.modifiers, decoder.frame
    number, ids = torch.zeros(rows, dtype=torch.long), torch.full((rows, 3), MASK)
    step = DecodeStep(
        frame=frame,
        row=torch.arange(rows),
        index=number,
        in_block=number,
        block_masks=number + 3,
        block=0,
        start=0,
        open=ids == MASK,
        ids=ids,
        attention_mask=ids == MASK,
        prompt=0,
        seeds=range(rows),
    )
    empty = torch.empty(0)
    drawn = noisy(step, Proposed(empty, empty, empty, empty), scores.repeat(rows)).reshape(rows, 3)
    order = drawn.argsort(dim=1, descending=True)
    first = (scores / 0.5).softmax(0)
    found = order[:, 0].bincount(minlength=3) / rows
    torch.testing.assert_close(found.double(), first, rtol=0, atol=0.03)
    both = (order[:, :2] == torch.tensor([0, 1])).all(1).double().mean().item()
    assert both == pytest.approx((first[0] * first[1] / (1 - first[0])).item(), abs=0.03)


@pytest.mark.parametrize("kind", ["prefix", "dual"])
@pytest.mark.parametrize("shift", [False, True])
def test_a_cache_is_exact_for_one_layer_and_decodes_with_more(kind, shift):
    region, padded = {"block_length": 4}, torch.cat([torch.full((3, 2), PAD), PROMPT], dim=1)
    mask = torch.ones(3, 6).bool()
    mask[:2, :2] = False
    written = {"name": "threshold", "committer": {"threshold": 0.5}, "region": region, "proposal": {"temperature": 1.0}}
    plain, kept = build(written, 12), build({**written, "cache": kind}, 12)
    for prompt, seen in ((padded, mask), (PROMPT[:, :0], None)):
        predictor = MaskPredictor(llama(layers=1), MASK, PAD, shift=shift)
        exact, cached = (decode(predictor, prompt, decoder, SEEDS, attention_mask=seen) for decoder in (plain, kept))
        assert exact.nfe.tolist() == cached.nfe.tolist()
        assert len(set(exact.nfe.tolist())) > 1  # rows leave a block at different steps
        assert torch.equal(exact.ids, cached.ids)
        assert torch.equal(exact.step_map, cached.step_map)
        torch.testing.assert_close(exact.commit_logp, cached.commit_logp, rtol=0, atol=1e-9)
    deep = MaskPredictor(qwen(), MASK, PAD, shift=shift)
    exact, cached = (decode(deep, padded, decoder, SEEDS, attention_mask=mask) for decoder in (plain, kept))
    assert not (cached.ids == MASK).any()
    first = (exact.step_map == 0) & (cached.step_map == 0)
    torch.testing.assert_close(exact.commit_logp[first], cached.commit_logp[first])  # nothing is kept yet
    assert not torch.allclose(exact.commit_logp, cached.commit_logp)


def test_a_model_without_a_cache_is_refused_one():
    with pytest.raises(InputError, match=r"decoder\.cache"):
        decode(random_table(12), PROMPT, build({"name": "threshold", "cache": "dual"}, 8))


def test_suppressed_tokens_are_never_proposed():
    decoder = build({"name": "low_confidence", "proposal": {"temperature": 1.0}, "suppressed": range(2, VOCAB)}, 8)
    assert set(decode(random_table(12), PROMPT, decoder, SEEDS).completion.flatten().tolist()) == {0, 1}


def test_a_row_stops_after_the_block_that_holds_its_end():
    written = {"name": "random", "region": {"block_length": 4}, "proposal": {"temperature": 1.5}}
    predictor, prompt, seeds = random_table(4 + 12), PROMPT[[0, 1, 2] * 6], range(18)
    whole = decode(predictor, prompt, build(written, 12, EOS), seeds)
    stopped = decode(predictor, prompt, build({**written, "eos_early_stop": True}, 12, EOS), seeds)
    assert len(set(stopped.nfe.tolist())) > 1
    for i in range(18):
        known = int(stopped.nfe[i])  # one token a step
        assert torch.equal(stopped.ids[i, : 4 + known], whole.ids[i, : 4 + known])
        assert torch.equal(stopped.step_map[i, :known], whole.step_map[i, :known])
        assert (stopped.completion[i, known:] == EOS).all()
        assert (stopped.step_map[i, known:] == known).all()
        assert (stopped.commit_logp[i, known:] == 0).all()
        assert known == 12 or EOS in stopped.completion[i, known - 4 : known]
        assert EOS not in stopped.completion[i, : known - 4]


def test_a_window_moves_with_the_first_mask():
    decoder = build({"name": "random", "region": {"window": 2}}, 8)
    step_map = decode(random_table(12), PROMPT, decoder, SEEDS).step_map
    for row in step_map.tolist():
        for s in range(8):
            masks = [i for i in range(8) if row[i] >= s]
            assert row.index(s) < masks[0] + 2
    assert not (step_map == torch.arange(8)).all()


def test_randomness_needs_seeds_one_for_each_row():
    with pytest.raises(ValueError, match="seed"):
        decode(random_table(12), PROMPT, build("random", 8))
    with pytest.raises(InputError, match="2 for 3"):
        decode(random_table(12), PROMPT, build("random", 8), SEEDS[:2])


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("treshold", "did you mean 'threshold'"),
        ({"name": "threshold", "comitter": "even"}, "did you mean 'committer'"),
        ({"committer": "evn"}, "did you mean 'even'"),
        ({"committer": {"threshold": 0.9}}, "unknown key, it has no options"),
        ({"committer": {"name": "threshold"}}, r"decoder\.committer\.threshold: required, but not given"),
        ({"region": {"block_length": 3}}, "3 does not divide the length 8"),
        ({"region": {"block_length": 2}, "steps": 6}, r"decoder\.steps: 6 does not divide into 4 blocks"),
        ({"name": "ass", "region": {"blocks": 4}}, "between 1 and 3"),
        ({"name": "ass", "region": {"name": "blocks", "block_length": 4}}, "need the region ascending"),
        ({"name": "ass", "steps": 8}, "as many steps as it needs"),
        ({"name": "threshold", "steps": 4}, "as many steps as it needs"),
        ({"name": "eoser", "scorer": "entropy"}, "a probability"),
        ({"name": "factor", "scorer": "uniform"}, "a probability"),
        ("trace_lock", r"decoder\.scorer\.controller: required, but not given"),
        (
            {"scorer": {"name": "confidence", "controller": "x"}},
            r"decoder\.scorer\.controller: unknown key, it has no",
        ),
        ({"scorer": 5}, r"decoder\.scorer: 5 is neither a word nor a map"),
        (5, "decoder: 5 is neither a name nor a map"),
        ({"name": "threshold", "cache": "dual", "cfg_scale": 1.0}, "neither"),
        ({"name": ["threshold"]}, r"decoder\.name: \['threshold'\] is unknown"),
        ({"proposal": {"name": ["sample"]}}, r"decoder\.proposal: \['sample'\] is unknown"),
        ({"proposal": {3: 1.0}}, r"decoder\.proposal\.3: unknown key, choose one of temperature"),
        ({"modifiers": [3]}, r"decoder\.modifiers\.0: 3 is neither a word nor a map"),
        ({"modifiers": "gumbel"}, r"decoder\.modifiers: 'gumbel' is not a list"),
        ({"modifiers": ["held_back", {}]}, r"decoder\.modifiers\.1: None is unknown, choose one of eoser"),
    ],
)
def test_a_wrong_decoder_is_one_sentence(written, message):
    with pytest.raises(InputError, match=message):
        build(written, LENGTH, EOS)


NO_NUMBER = "is wrong, input should be a valid number"


def gumbel(temperature):
    return {"modifiers": [{"name": "gumbel", "temperature": temperature}]}


def eoser(**options):
    return {"modifiers": [{"name": "eoser", "low": 0.4, "high": 1.0, **options}]}


def held_back(tokens):
    return {"modifiers": [{"name": "held_back", "tokens": tokens}]}


@pytest.mark.parametrize(
    ("name", "written", "message"),
    [
        ("random", {"proposal": {"temperature": "abc"}}, f"proposal.temperature: 'abc' {NO_NUMBER}"),
        ("random", {"proposal": {"temperature": None}}, "proposal.temperature: None is wrong"),
        ("random", {"proposal": {"temperature": [1.0]}}, f"proposal.temperature: [1.0] {NO_NUMBER}"),
        ("random", {"proposal": {"temperature": math.nan}}, "proposal.temperature: nan is wrong"),
        ("random", {"proposal": {"temperature": -1}}, "proposal.temperature: -1 is wrong"),
        ("random", {"proposal": {"top_p": 0}}, "proposal.top_p: 0 is wrong"),
        ("random", {"proposal": {"top_k": 1.5}}, "proposal.top_k: 1.5 is wrong"),
        ("random", {"proposal": {"top_k": 0}}, "proposal.top_k: 0 is wrong"),
        ("random", {"region": {"block_length": "a"}}, "region.block_length: 'a' is wrong"),
        ("random", {"region": {"block_length": 4.0}}, "region.block_length: 4.0 is wrong"),
        ("random", {"region": {"block_length": 0}}, "region.block_length: 0 is wrong"),
        ("random", {"region": {"window": 2.5}}, "region.window: 2.5 is wrong"),
        ("random", {"region": {"window": 0}}, "region.window: 0 is wrong"),
        ("ass", {"region": {"blocks": "x"}}, "region.blocks: 'x' is wrong"),
        ("entropy", {"committer": {"ratio": "a"}}, f"committer.ratio: 'a' {NO_NUMBER}"),
        ("entropy", {"committer": {"ratio": 1.5}}, "committer.ratio: 1.5 is wrong"),
        ("entropy", {"committer": {"least": "a"}}, "committer.least: 'a' is wrong"),
        ("origin", {"committer": {"ratio": -1}}, "committer.ratio: -1 is wrong"),
        ("threshold", {"committer": {"threshold": "abc"}}, "committer.threshold: 'abc' is wrong"),
        ("threshold", {"committer": {"threshold": math.nan}}, "committer.threshold: nan is wrong"),
        ("threshold", {"committer": {"share": "maybe"}}, "committer.share: 'maybe' is wrong"),
        ("threshold", {"committer": {"most": "x"}}, "committer.most: 'x' is wrong"),
        ("factor", {"committer": {"factor": [1]}}, "committer.factor: [1] is wrong"),
        ("factor", {"committer": {"factor": -5}}, "committer.factor: -5 is wrong"),
        ("random", gumbel(-1), "modifiers.0.temperature: -1 is wrong"),
        ("low_confidence", eoser(low="a"), "modifiers.0.low: 'a' is wrong"),
        ("low_confidence", eoser(progress="foo"), "modifiers.0.progress: 'foo' is not allowed, choose one of linear,"),
        ("random", held_back(3), "modifiers.0.tokens: 3 is wrong"),
        ("random", held_back([1, "a"]), "modifiers.0.tokens.1: 'a' is wrong"),
        ("trace_lock", {"scorer": {"controller": 3}}, "scorer.controller: 3 is wrong"),
        ("random", {"steps": 0}, "steps: 0 is wrong"),
        ("random", {"steps": 2.0}, "steps: 2.0 is wrong"),
        ("random", {"cfg_scale": "abc"}, f"cfg_scale: 'abc' {NO_NUMBER}"),
        ("random", {"cfg_scale": -1}, "cfg_scale: -1 is wrong"),
        ("random", {"suppressed": 3}, "suppressed: 3 is wrong"),
        ("random", {"suppressed": [4, -1]}, "suppressed.1: -1 is wrong"),
        ("random", {"eos_early_stop": "yes"}, "eos_early_stop: 'yes' is wrong"),
        ("random", {"cache": "double"}, "cache: 'double' is not allowed, did you mean 'dual'?"),
    ],
)  # fmt: skip
def test_an_option_of_a_wrong_type_or_size_is_one_sentence(name, written, message):
    with pytest.raises(InputError, match=f"^{re.escape(f'decoder.{message}')}"):
        build({"name": name, **written}, LENGTH, EOS)


def test_whole_numbers_and_functions_of_a_step_are_settings():
    def half(step):
        return torch.full(step.row.shape, 0.5)

    written = {"name": "scheduled", "cfg_scale": half, "committer": {"ratio": half}, "proposal": {"temperature": 1}}
    decoder = build({**written, **gumbel(half)}, LENGTH)
    assert decoder.proposal.temperature == 1.0
    assert decoder.cfg_scale is decoder.committer.ratio is decoder.modifiers[0].temperature is half


def test_suppressed_tokens_are_of_the_vocabulary(predictor):
    assert build({"suppressed": [VOCAB - 1]}, LENGTH, EOS, predictor).suppressed == (VOCAB - 1,)
    with pytest.raises(InputError, match=rf"^decoder\.suppressed: {VOCAB} is outside the vocabulary of {VOCAB} tokens"):
        build({"suppressed": [1, VOCAB]}, LENGTH, EOS, predictor)


def test_a_decoder_that_waits_for_the_end_needs_one():
    with pytest.raises(InputError, match="no such token"):
        build("eoser", LENGTH)
