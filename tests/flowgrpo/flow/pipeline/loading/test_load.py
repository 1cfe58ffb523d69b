"""What loading a policy does to the process, and what the files of a model can do to it."""

import shutil
import statistics
from dataclasses import astuple
from pathlib import Path

import pytest
import tiny
import torch
from cases import cases
from diffusers import StableDiffusion3Pipeline
from zoo import SPECIMENS

from flowgrpo.cli import main
from flowgrpo.data.embedded import EMBEDDED
from flowgrpo.data.generators import patterned
from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.loading import load
from flowgrpo.flow.pipeline.loading.load import load_policy
from rewards.patterns import parts

PATH, DIGITS = EMBEDDED["shapes"].folder, EMBEDDED["digits"].folder


@pytest.mark.parametrize(("device", "kept"), [("cpu", 1), ("meta", 0)])
def test_a_policy_on_a_cpu_keeps_freed_memory(monkeypatch, device, kept):
    called = []
    monkeypatch.setattr(load, "keep_freed_memory", lambda: called.append(True))
    load_policy("shapes", device=device)
    assert len(called) == kept


def test_a_dtype_that_is_none_is_refused_before_the_model_is_loaded():
    with pytest.raises(InputError, match="dtype: 'bfloat1' is unknown, did you mean 'bfloat16'"):
        load_policy("shapes", dtype="bfloat1")


def pictures(pipe, words):
    pipe.set_progress_bar_config(disable=True)
    call = {"num_inference_steps": 2, "guidance_scale": 3.0, "height": 64, "width": 64, "max_sequence_length": words}
    shape = (1, pipe.transformer.config.in_channels, *[64 // pipe.vae_scale_factor] * 2)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))  # torch's own in half precision is another
    return pipe("two red circles", latents=noise.to(pipe.transformer.dtype), output_type="pt", **call).images


@pytest.mark.parametrize("name", ["shapes", "patterns"])
def test_the_folder_of_an_embedded_model_loads_by_itself(name):
    folder = EMBEDDED[name].folder
    pipe = StableDiffusion3Pipeline.from_pretrained(folder)
    assert {model.dtype for model in pipe.components.values() if isinstance(model, torch.nn.Module)} == {torch.float32}
    without = StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None)
    for words in (1, 256):  # the pipeline itself puts zeros in the place of an absent T5
        assert torch.equal(pictures(pipe, words), pictures(without, words))
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 7_000_000


def test_the_model_of_patterns_draws_a_part_of_each_caption():
    prompts = patterned.captions("eval")[:12]
    images = load_policy("patterns").generate([Row(prompt, seed) for seed, prompt in enumerate(prompts)])
    means = [statistics.mean(values) for values in zip(*map(astuple, parts(images, prompts)), strict=True)]
    assert all(0.3 < mean < 0.95 for mean in means)  # layout, shapes, patterns


@pytest.fixture(scope="module")
def whole():
    """What the embedded model draws in full precision."""
    return pictures(StableDiffusion3Pipeline.from_pretrained(PATH), 1)


@pytest.mark.parametrize("dtype", cases([torch.bfloat16, torch.float16], [torch.float16]))
def test_the_embedded_model_draws_the_same_in_half_precision(dtype, whole):
    pipe = StableDiffusion3Pipeline.from_pretrained(PATH, dtype=dtype)
    assert {model.dtype for model in pipe.components.values() if isinstance(model, torch.nn.Module)} == {dtype}
    assert (pictures(pipe, 1).float() - whole).abs().mean() < 0.02


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("model", "file", "written", "said"),
    [
        (PATH, "model_index.json", DEEP, "m/model_index.json: lists and maps are nested deeper than 64"),
        (PATH, "model_index.json", "[]", "its model_index.json is not a map with the name of a class"),
        (PATH, "model_index.json", '{"_class_name": 5}', "its model_index.json is not a map with the name of a class"),
        (PATH, "model_index.json", r'{"_class_name": "\ud800"}', r"m/model_index.json: the text '\ud800' has half a"),
        (PATH, "model_index.json", '{"_class_name": "../os"}', "has no pipeline class '../os', which ./m asks for"),
        (PATH, "transformer/config.json", DEEP, "could not be loaded from its folder (RecursionError"),
        (PATH, "tokenizer/tokenizer_config.json", "[]", "could not be loaded from its folder (TypeError"),
        (DIGITS, "config.json", DEEP, "m/config.json: lists and maps are nested deeper than 64"),
        (DIGITS, "config.json", '"x"', "'./m' holds no model, or its config.json is not a map with a model_type"),
        (DIGITS, "config.json", '{"model_type": []}', "'./m' holds no model"),
        (DIGITS, "tokenizer.json", DEEP, "'./m' has no tokenizer (RecursionError"),
        (DIGITS, "tokenizer.json", "{}", "'./m' has no tokenizer (KeyError: 'added_tokens')"),
        (DIGITS, "model_index.json", DEEP, "m/model_index.json: lists and maps are nested deeper than 64"),
    ],
)
def test_the_files_of_a_model_are_anybody_s(tmp_path, monkeypatch, capsys, model, file, written, said):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "m")
    Path("m", file).write_text(written)
    assert main(["sample", "./m", "--prompt", "1", "--out", "o"]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_a_component_that_a_pipeline_makes_itself_need_not_be_in_its_folder(tmp_path):
    specimen = SPECIMENS["LongCatAudioDiTPipeline"]
    specimen.build().save_pretrained(tmp_path)
    assert "scheduler" in load.components_of(str(tmp_path))
    assert not (tmp_path / "scheduler").exists()
    load.check_files(str(tmp_path))
    shutil.rmtree(tmp_path / "vae")
    with pytest.raises(InputError, match="has no folder vae, which its model_index.json names"):
        load.check_files(str(tmp_path))


def test_networks_that_are_cut_later_stay_in_host_memory():
    pipe = tiny.sd3()
    load._finish(pipe, torch.device("meta"), None, None, on_host=["transformer"])
    assert {p.device.type for p in pipe.transformer.parameters()} == {"cpu"}
    assert {p.device.type for p in pipe.vae.parameters()} == {"meta"}
