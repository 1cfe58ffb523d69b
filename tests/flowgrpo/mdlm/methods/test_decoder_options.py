"""A decoder as a config writes it."""

import pytest

from flowgrpo.errors import InputError
from flowgrpo.mdlm.methods.decoder_options import Decoding, Rollouts
from flowgrpo.schema.validation import checked


def test_a_null_says_the_same_as_no_key():
    nulls = dict.fromkeys(Decoding.model_fields)
    assert checked(Decoding, nulls) == checked(Decoding, {}) == checked(Decoding, "low_confidence")


@pytest.mark.parametrize("model", [Decoding, Rollouts])
def test_a_decoder_that_was_written_out_is_read_back(model):
    decoder = checked(model, {"name": "threshold", "committer": {"threshold": 0.8}, "suppressed": [3]})
    assert checked(model, decoder.model_dump()) == decoder
    assert decoder.build(4, 1, "eval.decoder") == checked(model, decoder.model_dump()).build(4, 1, "eval.decoder")


def test_what_was_not_written_is_the_rows_own():
    decoder = checked(Decoding, {"name": "eoser", "steps": 2, "cfg_scale": 0.0})
    assert decoder.dump() == {"name": "eoser", "steps": 2}
    assert checked(Rollouts, {"proposal": "sample"}).dump()["proposal"] == {"name": "sample", "temperature": 1.0}


def test_errors_say_where_the_decoder_was_written():
    decoder = checked(Decoding, {"name": "trace_lock", "scorer": {"controller": "the decoder"}})
    with pytest.raises(InputError, match=r"^eval\.decoder\.scorer\.controller: .* in the decoder, "):
        decoder.build(4, 1, "eval.decoder")
