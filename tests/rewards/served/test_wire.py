"""Bodies of requests: what is no batch is refused in a sentence."""

import json
import re
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from serving import BODY, bright, here, tensors

from rewards import Reward
from rewards.served.server import app
from rewards.served.wire import CONTENT_TYPE, MOST_HEADER, as_floats, decode, encode


def written(**card):
    """A safetensors file of 8 zeros, described by a card that is right but for what is changed."""
    card = {"dtype": "F32", "shape": [2, 1, 4], "data_offsets": [0, 32], **card}
    header = json.dumps({"samples": card, "__metadata__": {"prompts": '["a", "b"]', "columns": "{}"}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(32)


def test_the_card_of_the_samples_is_right_but_for_what_is_changed():
    assert decode(bytearray(written())).samples.equal(torch.zeros(2, 1, 4))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (written(shape=[2, 1, 8]), "samples need 64 bytes"),
        (written(shape=[2, 1, 2**62]), "samples need .* bytes"),
        (written(shape=[2, 10**4299, 10**4299]), r"samples have the shape \[2, 10000"),  # their product has no digits
        (tensors(torch.rand(2, 3, 4, 4), columns='{"images": [1, 2]}'), "no column can have that name"),
        (written(shape=[2, -1, -4]), r"the shape \[2, -1, -4\]"),
        (written(shape=[2, 1.0, 4]), r"the shape \[2, 1.0, 4\]"),
        (written(shape="214"), "the shape 214"),
        (written(data_offsets=[4, 36]), "samples need 32 bytes"),
        (written(data_offsets=None), "samples need 32 bytes"),
        (written(dtype=["F32"]), r"samples are \['F32'\]"),
        (b"\x02" + bytes(7) + b"[]", "its header is not a JSON object of objects"),
        (b"\x12" + bytes(7) + b'{"__metadata__":1}', "its header is not a JSON object of objects"),
        (b"\x0d" + bytes(7) + b'{"samples":1}', "samples have no dtype, shape and data_offsets"),
        (b"", "is not a safetensors file"),
        (b"\x80\x04\x95garbage that looks like a pickle.", "is not a safetensors file"),
        (BODY[:-1], "is not a safetensors file"),
        (BODY + b"more", "is not a safetensors file"),
        (save({"images": torch.rand(2, 3, 4, 4)}), "must hold one tensor, named samples, or texts"),
        (save({"samples": torch.rand(2, 3, 4, 4)}), "must hold prompts"),
        (
            save({}, {"texts": "[]", "prompts": "[]", "columns": "{}"}),
            "texts in the header must be strings, one or more",
        ),
        (save({}, {"texts": "[1]", "prompts": "[1]", "columns": "{}"}), "texts in the header must be strings"),
        (tensors(torch.rand(2, 3, 4, 4).double()), "F64, not F32 or U8"),
        (tensors(torch.rand(2, 3)), r"the shape \[2, 3\]"),
        (tensors(torch.rand(0, 3, 4, 4)), r"the shape \[0, 3, 4, 4\]"),
        (tensors(torch.rand(2, 3, 4, 4), '["a"]'), "prompts must be 2 strings"),
        (tensors(torch.rand(2, 3, 4, 4), '["a", 1]'), "prompts must be 2 strings"),
        (tensors(torch.rand(2, 3, 4, 4), "a"), "prompts in the header are not JSON"),
        (tensors(torch.rand(2, 3, 4, 4), "[" * 100_000), "prompts in the header are not JSON"),
        (tensors(torch.rand(2, 3, 4, 4), columns="[]"), "columns in the header must be a JSON object"),
        (tensors(torch.rand(2, 3, 4, 4), columns='{"n": [1]}'), "the column 'n' must be a list of 2"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",  # safetensors orders what is in a header as it likes
)
def test_a_body_that_is_no_batch_is_refused_in_a_sentence(body, said):
    client = here(app([Reward("bright", lambda images, prompts, **columns: bright(images, prompts))]))
    answer = client.post("/bright", content=body, headers={"Content-Type": CONTENT_TYPE})
    assert answer.status_code == 422
    assert re.search(said, answer.json()["error"])
    assert client.post("/bright", content=BODY, headers={"Content-Type": CONTENT_TYPE}).status_code == 200


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(BODY) - 1), st.binary(min_size=1, max_size=4))
def test_no_body_whatever_raises_anything_but_a_sentence(place, data):
    try:
        batch = decode(bytearray(BODY[:place] + data + BODY[place + len(data) :]))
    except ValueError:
        return
    assert len(batch.samples) == len(batch.prompts)


def test_a_header_is_short_and_takes_forty_times_its_size_at_most():
    long = b"[" + b" " * MOST_HEADER + b"]"
    with pytest.raises(ValueError, match=f"a header of {MOST_HEADER} bytes at most"):
        decode(bytearray(len(long).to_bytes(8, "little") + long))
    for value in ("[]", "{}", "[{}]", "0.5", '"\U0001f600"', '{"":0}'):
        # a wide letter makes all text four times as large
        columns = f'{{"n": [{",".join([value] * (50_000 // len(value)))}], "\U0001f600": 0}}'
        metadata = {"texts": json.dumps(["a"]), "prompts": json.dumps(["a"]), "columns": columns}
        header = json.dumps({"__metadata__": metadata}, ensure_ascii=False).encode()
        body = bytearray(len(header).to_bytes(8, "little") + header)
        tracemalloc.start()
        with pytest.raises(ValueError, match="the column 'n' must be a list of 1"):
            decode(body)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 40 * len(header)


def test_levels_are_made_floats_when_their_turn_comes():
    body = b"".join(encode(torch.tensor([[[[0.0, 0.2, 1.0]]]]), ["a"], {}, "uint8"))
    samples = decode(bytearray(body)).samples
    assert samples.dtype == torch.uint8
    assert as_floats(samples).flatten().tolist() == pytest.approx([0, 0.2, 1])
