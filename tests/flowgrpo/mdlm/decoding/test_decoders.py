"""How a decoder is written: wrong words and options are one sentence."""

import math
import re

import pytest
import torch
from predictors import VOCAB

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.decoders import build

EOS, LENGTH = 13, 8


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("treshold", "did you mean 'threshold'"),
        ({"name": "threshold", "comitter": "even"}, "did you mean 'committer'"),
        ({"committer": "evn"}, "did you mean 'even'"),
        ({"committer": {"threshold": 0.9}}, "unknown key of even, which has no options"),
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
            r"decoder\.scorer\.controller: unknown key of confidence, which has no",
        ),
        ({"scorer": 5}, r"decoder\.scorer: 5 is neither a word nor a map"),
        (5, "decoder: 5 is neither a name nor a map"),
        ({"name": "threshold", "cache": "dual", "cfg_scale": 1.0}, "neither"),
        ({"name": ["threshold"]}, r"decoder\.name: \['threshold'\] is unknown"),
        ({"proposal": {"name": ["sample"]}}, r"decoder\.proposal: \['sample'\] is unknown"),
        ({"proposal": {3: 1.0}}, r"decoder\.proposal\.3: unknown key of sample, which has temperature"),
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
        ("random", {"cache": "double"}, "cache: 'double' is not allowed, choose one of prefix, dual"),
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
