"""Decoding: each row by itself, and what a rollout records is what was computed."""

from dataclasses import replace

import pytest
import torch
from predictors import MASK, PAD, VOCAB, llama, qwen, random_table

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.decode import decode
from flowgrpo.mdlm.decoding.decoders import DECODERS, build
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from flowgrpo.mdlm.decoding.tokens.token_proposals import Sample

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


def same_row(one, i, other, j):
    assert torch.equal(one.completion[i], other.completion[j])
    assert torch.equal(one.step_map[i], other.step_map[j])
    torch.testing.assert_close(one.commit_logp[i], other.commit_logp[j], rtol=0, atol=1e-9)


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
        for other, row in ((alone[i], 0), (moved, order.tolist().index(i)), (in_parts, i)):
            same_row(other, row, whole, i)
            assert other.nfe[row] == whole.nfe[i]
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
    assert name != "left_to_right" or (rollout.step_map == torch.arange(LENGTH)).all()


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


@pytest.mark.parametrize("kind", ["prefix", "dual"])
@pytest.mark.parametrize("shift", [False, True])
def test_a_cache_is_exact_for_one_layer_and_decodes_with_more(kind, shift):
    padded, mask = torch.cat([torch.full((3, 2), PAD), PROMPT], dim=1), torch.ones(3, 6).bool()
    mask[:2, :2] = False
    without = mask.clone()  # a prompt of padding alone, whose last column is fed where outputs are shifted
    without[0] = False
    plain, kept = (
        build({**spec("threshold"), "committer": {"threshold": 0.5}, "cache": own}, 12) for own in (None, kind)
    )
    for prompt, seen in ((padded, mask), (padded, without), (PROMPT[:, :0], None)):
        predictor = MaskPredictor(llama(layers=1), MASK, PAD, shift=shift)
        exact, cached = (decode(predictor, prompt, decoder, SEEDS, attention_mask=seen) for decoder in (plain, kept))
        assert exact.nfe.tolist() == cached.nfe.tolist()
        assert len(set(exact.nfe.tolist())) > 1  # rows leave a block at different steps
        same_row(exact, slice(3), cached, slice(3))
    deep = MaskPredictor(qwen(), MASK, PAD, shift=shift)
    exact, cached = (decode(deep, padded, decoder, SEEDS, attention_mask=mask) for decoder in (plain, kept))
    assert not (cached.ids == MASK).any()
    first = (exact.step_map == 0) & (cached.step_map == 0)
    torch.testing.assert_close(exact.commit_logp[first], cached.commit_logp[first])  # nothing is kept yet
    assert not torch.allclose(exact.commit_logp, cached.commit_logp)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [None, "prefix", "dual"])
def test_a_real_gpu_decodes_the_tokens_of_the_host(cache):
    written = {**spec("threshold"), "committer": {}, "cache": cache}
    there, here = (
        decode(MaskPredictor(llama().to(device), MASK, PAD), PROMPT.to(device), build(written, 12), SEEDS)
        for device in ("cuda", "cpu")
    )
    assert there.ids.is_cuda
    assert torch.equal(there.ids.cpu(), here.ids)
    assert torch.equal(there.step_map.cpu(), here.step_map)
    torch.testing.assert_close(there.commit_logp.cpu(), here.commit_logp, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["prefix", "dual"])
def test_a_cache_knows_which_rows_a_block_has(kind):
    """As many in the next block, but others, which begin elsewhere: each by itself has the same tokens."""
    prompt = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [PAD] * 6 + [5, 3], [5, 8, 9, 7, 9, 3, 2, 3]])
    fixed = torch.full((3, 8), MASK)
    fixed[2, :4], fixed[1, 4:] = torch.tensor([1, 2, 3, 4]), torch.tensor([4, 3, 2, 1])
    predictor, seen = MaskPredictor(qwen(), MASK, PAD), prompt != PAD
    decoder = build({**spec("threshold"), "committer": {}, "cache": kind}, 8)
    whole = decode(predictor, prompt, decoder, SEEDS, attention_mask=seen, fixed=fixed)
    for i in range(3):
        own = {"attention_mask": seen[i : i + 1], "fixed": fixed[i : i + 1]}
        same_row(whole, i, decode(predictor, prompt[i : i + 1], decoder, SEEDS[i : i + 1], **own), 0)


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


def test_a_row_at_temperature_0_takes_the_likeliest_tokens_beside_rows_that_draw_theirs():
    predictor, decoder = random_table(4 + LENGTH), build(spec("low_confidence"), LENGTH, EOS)
    mixed, drawn, likeliest = (
        decode(predictor, PROMPT, replace(decoder, proposal=Sample(temperature=temperature)), SEEDS)
        for temperature in (lambda step: (step.row != 1).double(), 1.0, 0.0)
    )
    assert not torch.equal(drawn.completion[1], likeliest.completion[1])
    for row, alone in enumerate((drawn, likeliest, drawn)):
        same_row(mixed, row, alone, row)


def test_randomness_needs_seeds_one_for_each_row():
    with pytest.raises(ValueError, match="seed"):
        decode(random_table(12), PROMPT, build("random", 8))
    with pytest.raises(InputError, match="2 for 3"):
        decode(random_table(12), PROMPT, build("random", 8), SEEDS[:2])


def test_a_guided_step_has_two_evaluations(predictor):
    for scale, each in ((0.0, 1), (1.5, 2)):
        before = predictor.evaluations
        rollout = decode(predictor, PROMPT, build({"name": "low_confidence", "steps": 4, "cfg_scale": scale}, LENGTH))
        assert rollout.steps.tolist() == [4] * 3
        assert rollout.nfe.tolist() == [4 * each] * 3
        assert predictor.evaluations - before == int(rollout.nfe.sum())


PLAIN = [{}, {"proposal": {"temperature": 1.0}}]
BENT = [*({"proposal": each} for each in ({"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.9})), {"suppressed": [2]}]


@pytest.mark.parametrize("written", [*PLAIN, *BENT, {"cfg_scale": 1.0}, {"cache": "prefix"}])
def test_what_is_recorded_is_the_model_s_own_distribution_or_is_said_not_to_be(written):
    assert build({"name": "low_confidence", **written}, LENGTH).recorded == (written in PLAIN)


def test_an_end_that_is_given_later_on_stops_nothing(predictor):
    """Two blocks of 4; the end stands in the second from the start, so that both are filled."""
    fixed = torch.full((1, LENGTH), MASK)
    fixed[0, 6] = EOS
    spec = {"name": "low_confidence", "region": {"block_length": 4}, "eos_early_stop": True, "suppressed": [EOS]}
    rollout = decode(predictor, PROMPT[:1], build(spec, LENGTH, EOS), fixed=fixed)
    assert (rollout.completion == EOS).nonzero().tolist() == [[0, 6]]
    assert rollout.step_map[0, 6] == -1
    assert sorted(rollout.step_map[0].tolist()) == [-1, 0, 1, 2, 3, 4, 5, 6]


def test_drafts_take_the_room_of_the_decoder_s_steps(predictor):
    few = build({"name": "low_confidence", "steps": 2}, LENGTH, EOS)
    assert decode(predictor, PROMPT, few, SEEDS, drafts=True).drafts.shape == (len(PROMPT), 2, LENGTH)
    # of an open window of one token nothing goes before the last of the steps, and one at a time from then on
    window = {"name": "entropy", "region": {"window": 1}}
    rollout = decode(predictor, PROMPT, build(window, LENGTH, EOS), SEEDS, drafts=True)
    assert LENGTH < int(rollout.steps.max()) <= rollout.drafts.shape[1] == 2 * LENGTH


def test_a_draft_has_no_suppressed_token(predictor):
    first = decode(predictor, PROMPT, build("low_confidence", LENGTH, EOS), SEEDS, drafts=True).drafts[:, 0]
    likely = first.unique().tolist()
    made = build({"name": "low_confidence", "suppressed": likely}, LENGTH, EOS)
    assert not torch.isin(decode(predictor, PROMPT, made, SEEDS, drafts=True).drafts, torch.tensor(likely)).any()


@pytest.mark.parametrize("name", ["low_confidence", "left_to_right", "origin"])
def test_a_draft_is_what_the_model_holds_likeliest_behind_what_is_committed(predictor, name):
    rollout = decode(predictor, PROMPT, build(spec(name), LENGTH, EOS), SEEDS, drafts=True)
    assert torch.equal(rollout.ids, decode(predictor, PROMPT, build(spec(name), LENGTH, EOS), SEEDS).ids)
    for step in range(int(rollout.steps.max())):
        canvas = rollout.canvas(step, MASK)
        likeliest = predictor.logits(canvas, rollout.attention_mask)[:, PROMPT.shape[1] :].argmax(-1)
        completion = canvas[:, PROMPT.shape[1] :]
        expected = torch.where(completion == MASK, likeliest, completion)
        going = rollout.steps > step
        assert torch.equal(rollout.drafts[going, step].long(), expected[going])
