"""Files that lack weights are refused by their headers, for every command, and nothing is loaded before."""

import json
import re
import shutil
import struct

import diffusers
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from flowgrpo.cli import main
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.loading import load
from flowgrpo.training.model_files import hub_files, weight_check

CLIP = "text_encoder/model.safetensors"
NETWORK = "transformer/diffusion_pytorch_model.safetensors"
KINDS = {CLIP: transformers.CLIPTextModelWithProjection, NETWORK: diffusers.SD3Transformer2DModel}
QUERY = "text_model.encoder.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def model(tiny_model, tmp_path):
    return shutil.copytree(tiny_model, tmp_path / "model")


def rewritten(model, file, change):
    """Write the tensors of a file of a model again, as a function changes them."""
    save_file(change(load_file(model / file)), model / file, {"format": "pt"})


def check(model, file):
    weight_check.check(str(model), str(model), KINDS[file], file.partition("/")[0])


def without(*names):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def prefixed(prefix):
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


def unprefixed(prefix):
    return lambda tensors: {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def added(name, tensor):
    return lambda tensors: tensors | {name: tensor}


WRONG = [
    (CLIP, without(QUERY), rf"lacks 1 of the 37 weights of CLIPTextModelWithProjection \({QUERY}\)$"),
    (CLIP, lambda t: t | {f"{QUERY}s": t.pop(QUERY)}, rf"lacks 1 of .* \({QUERY}\); it has {QUERY}s instead$"),
    (CLIP, prefixed("foo."), r"lacks all 37 weights .*; its names would match without the prefix 'foo\.'$"),
    (NETWORK, prefixed("model.diffusion_model."), r"lacks .* match without the prefix 'model\.diffusion_model\.'$"),
    (
        NETWORK,
        unprefixed("transformer_blocks."),
        r"lacks .*; its names would match with the prefix 'transformer_blocks\.'$",
    ),
    (NETWORK, lambda t: {}, r"lacks all \d+ weights of SD3Transformer2DModel"),
    (
        NETWORK,
        added("proj_out.bias", torch.zeros(3)),
        r"holds proj_out\.bias of shape \[3\], where SD3Transformer2DModel has \[16\] by its config$",
    ),
    (
        NETWORK,
        added("proj_out.weight_scale", torch.ones(1)),
        r"holds proj_out\.weight_scale, and by its config this layer of SD3Transformer2DModel has no such weight$",
    ),
]


@pytest.mark.parametrize(("file", "change", "sentence"), WRONG)
def test_what_a_file_lacks_or_has_otherwise_is_a_sentence(model, file, change, sentence):
    check(model, file)
    rewritten(model, file, change)
    with pytest.raises(InputError, match=rf"^model\.path: {re.escape(str(model))}: {file} {sentence}") as refused:
        check(model, file)
    assert "\n" not in str(refused.value)


def test_tensors_of_layers_that_the_class_does_not_have_are_told_and_left_out(model):
    rewritten(model, NETWORK, added("lm_head.weight", torch.ones(2, 2)))
    said = rf"{NETWORK} holds 1 tensors that SD3Transformer2DModel has no use for \(lm_he"
    with pytest.warns(UserWarning, match=said):
        check(model, NETWORK)


def test_a_library_s_own_rules_say_what_may_be_missing(model):
    """T5 ties its embeddings, and CLIP's position ids were once in its files."""
    encoder = transformers.T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    transformers.T5EncoderModel(encoder).save_pretrained(model / "t5")
    assert "encoder.embed_tokens.weight" not in load_file(model / "t5" / "model.safetensors")
    weight_check.check("t5", str(model), transformers.T5EncoderModel, "t5")
    rewritten(model, CLIP, added("text_model.embeddings.position_ids", torch.arange(8)[None]))
    check(model, CLIP)


def test_layers_that_a_library_quantised_count_by_what_they_hold(model):
    """bitsandbytes writes codes of another shape under a weight's name, and its scales beside them."""
    config = json.loads((model / "text_encoder" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (model / "text_encoder" / "config.json").write_text(json.dumps(config))
    codes = {QUERY: torch.zeros(512, 1, dtype=torch.uint8), f"{QUERY}.absmax": torch.zeros(16)}
    rewritten(model, CLIP, lambda t: t | codes)
    check(model, CLIP)
    other = QUERY.replace("q_proj", "k_proj")
    rewritten(model, CLIP, without(other, other.replace("weight", "bias")))
    with pytest.raises(InputError, match=r"lacks 2 of the 37 weights .*k_proj"):
        check(model, CLIP)


def test_nothing_is_loaded(model):
    """The file says that it holds 8 GiB, and has no block on the disk for them."""
    shape = [2**16, 2**15]
    header = json.dumps({"a.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, 2**33]}}).encode()
    with open(model / CLIP, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 2**33)
    before = torch.get_rng_state()
    with pytest.raises(InputError, match=r"lacks all 37 weights"):
        check(model, CLIP)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("file", [CLIP, NETWORK, "vae/diffusion_pytorch_model.safetensors"])
def test_every_command_refuses_it_before_it_computes(model, finished, monkeypatch, capsys, file):
    work = shutil.copytree(finished, model.parent / "work")
    monkeypatch.chdir(work)
    was = re.search(r"path: ([^,]+),", (work / "tiny.yaml").read_text())[1]
    for config in ("tiny.yaml", "runs/t/config.yaml"):
        (work / config).write_text((work / config).read_text().replace(was, str(model)))
    rewritten(model, file, lambda t: without(min(t))(t))
    monkeypatch.setattr("flowgrpo.training.scoring.scorer.rewards", lambda *uses: pytest.fail("a reward is made"))
    for command in (
        ["train", "tiny.yaml", "run.name=other"],
        ["plan", "tiny.yaml"],
        ["doctor", "tiny.yaml"],
        ["sample", str(model), "--prompt", "a cat", "--out", "samples"],
        ["sample", "tiny.yaml", "--groups", "groups"],
        ["export", "runs/t", "--out", "exported"],
    ):
        assert main(command) == 2, command
        told = capsys.readouterr()
        assert re.fullmatch(rf"flowgrpo: model\.path: .*: {file} lacks 1 of the \d+ weights of .*\n", told.err)
        assert not told.out.strip(), command
    assert not (work / "samples").exists()
    assert not (work / "exported").exists()


def test_a_file_that_the_library_does_not_open_is_not_looked_at(model):
    shutil.copy(model / CLIP, model / "text_encoder/diffusion_pytorch_model.safetensors")
    rewritten(model, CLIP, without(QUERY))
    with pytest.raises(InputError, match=r"text_encoder/model.safetensors lacks 1 of the 37 weights"):
        check(model, CLIP)


def test_files_of_the_hub_without_headers_are_held_against_the_class_once_they_are_here(model, monkeypatch):
    tensors = without(QUERY)(load_file(model / CLIP))
    (model / CLIP).unlink()
    torch.save(tensors, model / "text_encoder/pytorch_model.bin")
    monkeypatch.setattr(load, "place_of", lambda path: path)
    monkeypatch.setattr(load, "index_of", lambda path: json.loads((model / "model_index.json").read_text()))
    monkeypatch.setattr(load, "weights_at", lambda path, *args: hub_files.weights_at(str(model), *args))
    monkeypatch.setattr(load, "cached_folder", lambda path: str(model))
    with pytest.raises(InputError, match=r"owner/name: text_encoder/pytorch_model.bin lacks 1 of the 37 weights"):
        load._check_downloaded("owner/name", {"text_encoder", "vae"}, None)
