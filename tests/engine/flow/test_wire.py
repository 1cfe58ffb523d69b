"""What an engine may send, and what is refused; the exchanges of tests/data/engine were written by tests/fake_engine.py."""

import base64
import json
import pickle
from pathlib import Path

import fake_engine
import msgpack
import pytest
import torch
from safetensors.torch import save

from flowgrpo_engine.flow import wire
from flowgrpo_engine.service import EngineError

DATA = Path(__file__).parents[2] / "data" / "engine"
# The fields of RolloutRequest and RolloutResponse, io_struct.py of sgl-project/sglang at 00e1106f.
REQUEST = {
    *("prompt", "negative_prompt", "seed", "generator_device", "width", "height", "num_inference_steps"),
    *("num_outputs_per_prompt", "guidance_scale", "true_cfg_scale", "num_frames", "fps", "rollout", "rollout_sde_type"),
    *("rollout_noise_level", "rollout_log_prob_no_const", "rollout_debug_mode", "rollout_return_denoising_env"),
    *("rollout_return_dit_trajectory", "rollout_sde_step_indices", "rollout_return_step_indices", "image_path"),
    *("suppress_logs", "extra_sampling_params"),
}
ANSWER = {
    *("request_id", "prompt", "seed", "generated_output", "rollout_log_probs", "rollout_debug_tensors"),
    *("denoising_env", "dit_trajectory", "inference_time_s", "peak_memory_mb"),
}


def test_the_exchanges_have_the_fields_of_the_engines_source():
    asked = json.loads((DATA / "rollout_request.json").read_text())
    assert asked.keys() <= REQUEST
    assert (asked["rollout"], asked["rollout_debug_mode"], asked["rollout_return_denoising_env"]) == (
        True,
        False,
        False,
    )
    assert (asked["rollout_sde_step_indices"], asked["rollout_return_step_indices"]) == ([1, 2], [1, 2, 3])
    for name in ("rollout_answer", "rollout_answer_base64"):
        for sample in wire.samples((DATA / f"{name}.msgpack").read_bytes(), 2):
            assert sample.keys() == ANSWER
            assert (sample["rollout_debug_tensors"], sample["denoising_env"]) == (None, None)
            tensors = [sample["generated_output"], sample["rollout_log_probs"], *sample["dit_trajectory"].values()]
            assert all(tensor.keys() == {"__tensor__", "data", "shape", "dtype"} for tensor in tensors)


def test_tensors_are_read_from_bytes_and_from_base64_alike():
    plain, text = (
        wire.samples((DATA / f"{name}.msgpack").read_bytes(), 2)[1]["dit_trajectory"]["latents"]
        for name in ("rollout_answer", "rollout_answer_base64")
    )
    assert (type(plain["data"]), type(text["data"])) == (bytes, str)
    found = wire.tensor(plain, "latents", [3, 4, 8, 8])
    assert torch.equal(found, wire.tensor(text, "latents", [None, 4, 8, 8]))
    assert 0.5 < float(found[0].std()) < 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"<html>Bad gateway</html>", "answered in another format than msgpack"),
        (b"", "answered in another format than msgpack"),
        (b"\xdd\xff\xff\xff\xff", "answered in another format than msgpack"),  # a list of four billion
        (b"\x91" * 5000, "answered in another format than msgpack"),
        (msgpack.packb({"detail": "no"}), "did not answer with a list of samples"),
        (msgpack.packb([1, 2]), "did not answer with a list of samples"),
        (msgpack.packb([{}]), "answered with 1 samples instead of 2"),
    ],
)
def test_an_answer_that_is_no_list_of_samples_is_refused_in_a_sentence(content, said):
    with pytest.raises(EngineError, match=said):
        wire.samples(content, 2)


class Trap:
    def __reduce__(self):
        return pytest.fail, ("it was run",)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (None, "sent no tensor as latents"),
        ([1.0], "sent no tensor as latents"),
        ({"__tensor__": True}, "sent latents as NoneType instead of safetensors"),
        ({"__tensor__": True, "data": pickle.dumps(Trap())}, "sent latents that is not one tensor in safetensors"),
        ({"__tensor__": True, "data": "§$%"}, "sent latents that is not one tensor in safetensors"),
        ({"__tensor__": True, "data": save({"t": torch.ones(2, 3)})[:-1]}, "not one tensor in safetensors"),
        ({"__tensor__": True, "data": save({"t": torch.ones(1), "u": torch.ones(1)})}, "not one tensor in safetensors"),
        ({"__tensor__": True, "data": base64.b64encode(b"12345678").decode()}, "not one tensor in safetensors"),
        (fake_engine.serialized(torch.ones(2, 4)), "sent latents of 2 x 4 in float32, not 2 x 3 in float32"),
        (fake_engine.serialized(torch.ones(())), "sent latents of a number in float32, not 2 x 3 in float32"),
        (fake_engine.serialized(torch.ones(2, 3).long()), "sent latents of 2 x 3 in int64, not 2 x 3 in float32"),
        ({"__tensor__": True, "data": save({"u": torch.ones(2, 3)})}, "sent latents of 2 x 3"),
    ],
)
def test_a_tensor_that_is_not_what_was_asked_for_is_refused_in_a_sentence(written, said):
    with pytest.raises(EngineError, match=said):
        wire.tensor(written, "latents", [2, 3])
