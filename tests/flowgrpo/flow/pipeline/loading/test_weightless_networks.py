"""Networks without weights, and pipelines that encode their prompts with them."""

from contextlib import nullcontext

import pytest
import tiny
import torch
from cases import cases
from zoo import REPRESENTATIVE, SPECIMENS, numbers

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.inputs.prompt_embeddings import EmbeddingCache
from flowgrpo.flow.pipeline.loading import load, weightless_networks
from flowgrpo.flow.pipeline.loading.load import load_policy
from flowgrpo.flow.pipeline.networks.traits import networks

WHOLE = {"OmniGenPipeline"}  # has no text encoder
# One text encoder and several, none to encode, constructors that set up the network or keep a tuple, a frozen network
# beside the trained one; `rollouts/test_prompt_encoding` has runs with a picture in the prompt, and with two networks.
TRIED = (
    "FluxPipeline",
    "OmniGenPipeline",
    "StableAudio3Pipeline",
    "Flux2KleinKVPipeline",
    "Krea2Pipeline",
    "ZImageControlNetPipeline",
)
CALL = tiny.CALLS["sd3"]
ROWS = [Row("a red circle", 0), Row("two blue square", 1)]


@pytest.mark.usefixtures("small_pictures")
@pytest.mark.parametrize("name", cases(sorted(SPECIMENS), TRIED))
def test_prompts_encoded_without_the_networks_give_the_same_samples(name, tmp_path):
    specimen = SPECIMENS[name]
    specimen.build().save_pretrained(tmp_path)
    rows, call = specimen.rows[1:], {**specimen.call, "num_inference_steps": 2}
    seen = []

    def encode(policy):
        seen.append(next(p.device.type for network in policy.modules.values() for p in network.parameters()))
        policy.prepare(rows)

    try:
        expected = numbers(load_policy(str(tmp_path), call=call, device="cpu").generate(rows))
    except Exception as error:  # one that cannot be trained
        pytest.skip(str(error))
    policy = load_policy(str(tmp_path), call=call, device="cpu", encode=encode, text_encoders="free")
    assert torch.equal(numbers(policy.generate(rows)), expected)  # a text encoder that ran again would be missing
    if name in REPRESENTATIVE:
        assert (seen == ["cpu"]) == (name in WHOLE)
    assert {p.device.type for network in policy.modules.values() for p in network.parameters()} == {"cpu"}


def test_a_weightless_network_is_what_a_pipeline_reads_of_it(tiny_model):
    index, real = load.index_of(str(tiny_model)), load_policy(str(tiny_model), device="cpu").modules["transformer"]
    before = torch.random.get_rng_state()
    made = weightless_networks.networks(
        weightless_networks.classes(index), str(tiny_model), torch.bfloat16, torch.device("cpu")
    )["transformer"]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert isinstance(made, type(real))
    assert type(made).__name__ == type(real).__name__
    assert {**made.config, "_name_or_path": None} == {**real.config, "_name_or_path": None}
    assert (made.dtype, made.device) == (torch.bfloat16, torch.device("cpu"))
    assert made.to("cpu") is made
    assert {p.device.type for p in made.parameters()} == {"meta"}
    for module in (made, made.time_text_embed):
        with pytest.raises(
            InputError, match="of transformer computes while the prompts are encoded, .* set it to keep"
        ):
            module(torch.zeros(1))


def test_weights_that_stay_in_float32_do_so_without_their_numbers(tmp_path):
    SPECIMENS["WanPipeline"].build().save_pretrained(tmp_path)
    index = load.index_of(str(tmp_path))
    made = weightless_networks.networks(
        weightless_networks.classes(index), str(tmp_path), torch.bfloat16, torch.device("cpu")
    )["transformer"]
    real = load_policy(str(tmp_path), "bfloat16", device="cpu").modules["transformer"]
    kinds = {name: p.dtype for name, p in real.named_parameters()}
    assert {name: p.dtype for name, p in made.named_parameters()} == kinds
    assert set(kinds.values()) == {torch.bfloat16, torch.float32}


def test_a_new_prompt_brings_resting_encoders_back_and_freed_ones_are_missed(tiny_model):
    options = {"call": CALL, "device": "cpu", "encode": lambda policy: policy.prepare(ROWS)}
    new = [Row("a green circle", 3)]
    expected = load_policy(str(tiny_model), call=CALL, device="cpu").generate(new)
    policy = load_policy(str(tiny_model), **options, text_encoders="offload")
    assert not isinstance(policy.pipe.text_encoder, torch.nn.Module)
    assert torch.equal(policy.generate(new), expected)
    assert not isinstance(policy.pipe.text_encoder, torch.nn.Module)
    with pytest.raises(InputError, match="the text encoders were freed: set model.text_encoders=offload"):
        load_policy(str(tiny_model), **options, text_encoders="free").generate(new)
    with pytest.raises(InputError, match="of transformer computes while the prompts are encoded"):
        load_policy(str(tiny_model), call=CALL, device="cpu", encode=lambda p: p.start(ROWS), text_encoders="free")


def test_encoders_of_which_one_finds_no_room_leave_the_device_together(tiny_model):
    options = {"call": CALL, "device": "cpu", "encode": lambda policy: policy.prepare(ROWS)}
    policy = load_policy(str(tiny_model), **options, text_encoders="offload")
    moves, encoders = [], dict(policy.pipe.encode_prompt._offloaded)
    assert len(encoders) > 1
    last = list(encoders)[-1]

    def moved(name, module, place):
        moves.append(name)
        if moves.count(name) == 1 and name == last:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return module

    for name, module in encoders.items():
        module.to = lambda place, name=name, module=module: moved(name, module, place)
    with pytest.raises(torch.OutOfMemoryError):
        policy.generate([Row("a green circle", 3)])
    assert moves == 2 * list(encoders)  # there and away, the last one too, of which a part may be there
    assert not any(isinstance(getattr(policy.pipe, name), torch.nn.Module) for name in encoders)
    assert policy.generate([Row("a green circle", 3)]).isfinite().all()


def test_kept_encoders_are_beside_the_networks_from_the_start(tiny_model):
    seen = []
    load_policy(
        str(tiny_model), call=CALL, device="cpu", encode=lambda p: seen.append(p.pipe.transformer), text_encoders="keep"
    )
    assert {p.device.type for p in seen[0].parameters()} == {"cpu"}


def test_encoders_have_left_the_device_when_the_networks_are_loaded(tiny_model, monkeypatch):
    """In the order of what happens to the device, which here is only pretended to be another."""
    events = []
    rest, fill, to = EmbeddingCache.offload, weightless_networks.fill, type(tiny.sd3()).to
    monkeypatch.setattr(EmbeddingCache, "offload", lambda cache: (events.append("rest"), rest(cache)))
    monkeypatch.setattr(weightless_networks, "fill", lambda *a, **o: (events.append("load"), fill(*a, **o)))

    def moved(pipe, device):
        names = [name for name, m in pipe.components.items() if isinstance(m, torch.nn.Module)]
        weights = [n for n in names if next(getattr(pipe, n).parameters()).device.type != "meta"]
        events.append(sorted(weights))
        return to(pipe, device)

    monkeypatch.setattr(type(tiny.sd3()), "to", moved)
    policy = load_policy(
        str(tiny_model),
        call=CALL,
        device="cpu",
        encode=lambda policy: (events.append("encode"), policy.prepare(ROWS)),
        text_encoders="offload",
        quantise="int8",
    )
    assert events == [["text_encoder", "text_encoder_2", "vae"], "encode", "rest", "load", ["transformer", "vae"]]
    assert "codes" in " ".join(name for name, _ in networks(policy.pipe)["transformer"].named_parameters())


def test_a_row_of_another_size_is_refused_although_it_was_encoded_first(tmp_path):
    tiny.flux().save_pretrained(tmp_path)
    rows = [Row("a red circle", 0), Row("a blue square", 1, {"height": 32})]
    for ahead, refused in ((rows[:1], False), (rows, True)):
        policy = load_policy(
            str(tmp_path),
            call=tiny.CALLS["flux"],
            device="cpu",
            encode=lambda policy, ahead=ahead: policy.prepare(ahead),
            text_encoders="offload",
        )
        with pytest.raises(InputError, match="start from latents of unequal shapes") if refused else nullcontext():
            policy.start(rows[:1])
