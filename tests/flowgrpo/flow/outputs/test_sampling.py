"""Switches of memory and speed of `flowgrpo sample` on pipelines: the same samples, or one sentence."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from runs import CALL

from flowgrpo.cli import main
from flowgrpo.flow.pipeline.networks.compiled_blocks import CompiledBlocks
from flowgrpo.flow.pipeline.policy import DiffusersPolicy

PROMPTS = ["a red circle", "two blue square", "a green circle"]


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "flux"
    tiny.flux().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(tiny_model, tmp_path_factory):
    """The pictures of the tiny model without any switch."""
    return sampled(tiny_model, tmp_path_factory.mktemp("plain") / "o")


def sampled(model, out, *options):
    """The pictures that the command writes, or its exit status."""
    asked = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    call = [f"{k}={v}" for k, v in CALL.items()]
    status = main(["sample", str(model), *asked, "--out", str(out), *options, *call])
    return status or [(Path(out) / f"{i:04d}.png").read_bytes() for i in range(len(PROMPTS))]


@pytest.mark.parametrize(
    "options",
    [
        ["--batch-size", "1", "--vae", "offload"],
        ["--text-encoders", "offload", "--vae-tiling"],  # of so small a picture there is one tile
        ["--text-encoders", "free", "--batch-size", "2"],
    ],
    ids=" ".join,
)
def test_switches_change_no_sample(workplace, tiny_model, plain, options):
    assert sampled(tiny_model, "with", *options) == plain


def test_a_batch_has_the_size_that_is_asked_for(workplace, tiny_model, monkeypatch):
    sizes, generate = [], DiffusersPolicy.generate
    monkeypatch.setattr(DiffusersPolicy, "generate", lambda self, rows: sizes.append(len(rows)) or generate(self, rows))
    sampled(tiny_model, "o", "--batch-size", "2")
    assert sizes == [2, 1]


def test_freed_text_encoders_encode_every_prompt_first(workplace, tiny_model, monkeypatch):
    encoded, prepare, generate = [], DiffusersPolicy.prepare, DiffusersPolicy.generate

    def prepared(self, rows, key):
        prepare(self, rows, key)
        encoded.extend(row.prompt for row in rows)

    def generated(self, rows):
        assert encoded == PROMPTS
        assert not isinstance(self.pipe.text_encoder, torch.nn.Module)
        return generate(self, rows)

    monkeypatch.setattr(DiffusersPolicy, "prepare", prepared)
    monkeypatch.setattr(DiffusersPolicy, "generate", generated)
    assert len(sampled(tiny_model, "o", "--text-encoders", "free", "--batch-size", "1")) == 3


def test_an_attention_backend_is_that_of_the_pipeline(workplace, flux, capsys):
    assert len(sampled(flux, "o", "--attention", "_native_math")) == 3
    assert sampled(flux, "p", "--attention", "xformers") == 2
    assert capsys.readouterr().err.startswith("flowgrpo: --attention: xformers computes on a GPU only, and there is")


def test_blocks_are_compiled_for_sampling(workplace, tiny_model, monkeypatch):
    compiled = []

    def compiling(networks):  # which has tests of its own
        compiled.extend(networks)
        return CompiledBlocks([])

    monkeypatch.setattr("flowgrpo.flow.setup.CompiledBlocks", compiling)
    assert len(sampled(tiny_model, "o", "--compile", "--batch-size", "1")) == 3
    assert [type(network).__name__ for network in compiled] == ["SD3Transformer2DModel"]


def test_a_compiler_that_is_missing_is_one_sentence(workplace, tiny_model, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-compiler")
    assert sampled(tiny_model, "o", "--compile") == 2
    said = "flowgrpo: --compile: PyTorch compiles for cpu with no-compiler, which is"
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--attention", "_native_math"],
            "--attention: SD3Transformer2DModel has its attention fixed to PyTorch's own",
        ),
        (
            ["--attention", "sage"],
            "--attention: 'sage' quantises, so the log-probs of a rollout would not be the model's; ",
        ),
        (["--attention", "_native_mth"], "--attention: '_native_mth' is not allowed, did you mean '_native_math'?"),
        (["--vae", "free"], "'free' is not one of 'keep', 'offload'"),
        (["--batch-size", "0"], "Invalid value for '--batch-size': "),
        (["--column", "text"], "--column: it is one of the file that --prompts names, there is none"),
    ],
)
def test_a_switch_that_cannot_be_is_one_sentence(workplace, tiny_model, capsys, options, said):
    assert sampled(tiny_model, "o", *options) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.startswith("flowgrpo: ")
    assert told.count("\n") == 1
    assert not Path("o").exists()


def test_prompts_stand_in_the_column_that_is_named(workplace, tiny_model, capsys):
    Path("rows.csv").write_text("caption,n\na red circle,1\na blue circle,2\n")
    call = [f"{k}={v}" for k, v in CALL.items()]
    asked = ["sample", str(tiny_model), "--prompts", "rows.csv", *call]
    assert main([*asked, "--out", "o", "--column", "caption"]) == 0
    lines = [json.loads(line) for line in Path("o/manifest.jsonl").read_text().splitlines()]
    assert [(line["prompt"], line["n"]) for line in lines] == [("a red circle", "1"), ("a blue circle", "2")]
    assert main([*asked, "--out", "p"]) == 2
    assert "the row has no key 'prompt', it has caption, n; prompts.column (--column of a" in capsys.readouterr().err
