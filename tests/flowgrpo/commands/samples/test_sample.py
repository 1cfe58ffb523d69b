"""`flowgrpo sample` on flow models, and what is refused before any model."""

import json
from pathlib import Path

import pytest
from runs import CALL

from flowgrpo.cli import main

ARGUMENTS = [f"{key}={value}" for key, value in CALL.items()]


@pytest.fixture
def nothing_loaded(tmp_path, monkeypatch, unloaded):
    """A folder to work in, in which no model is loaded."""
    monkeypatch.chdir(tmp_path)
    loader = "flowgrpo.mdlm.outputs.sampling.load_text_policy"
    monkeypatch.setattr(loader, lambda *a: pytest.fail("the model was loaded"))


@pytest.mark.parametrize(
    ("kind", "file", "content"),
    [
        ("shapes", "pytorch_lora_weights.safetensors", b"\x40"),
        ("digits", "adapter_model.safetensors", b"\x40" + b"\0" * 7 + b"{"),
        ("digits", "adapter_config.json", b'{"r": '),
    ],
)
def test_an_adapter_that_was_cut_off_is_one_sentence_before_the_model(
    tmp_path, nothing_loaded, refused, kind, file, content
):
    (tmp_path / "adapter").mkdir()
    if kind == "digits":
        (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
        (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"\x02" + b"\0" * 7 + b"{}")
    (tmp_path / "adapter" / file).write_bytes(content)
    assert f"adapter/{file}" in refused("sample", kind, "--prompt", "a", "--out", "out", "--adapter", "adapter")
    assert not (tmp_path / "out").exists()


def test_a_run_in_place_of_a_model_is_told_to_be_exported(tmp_path, nothing_loaded, refused):
    (tmp_path / "runs/t/checkpoints").mkdir(parents=True)
    (tmp_path / "runs/t/config.yaml").write_text("model: {path: shapes, lora: null}")
    asked = ("--prompt", "a", "--out", "out")
    assert refused("sample", "runs/t", *asked) == (
        "model.path: runs/t is a run; export it and give the export (of a LoRA: give its model, and --adapter=runs/t)"
    )
    assert refused("sample", "shapes", *asked, "--adapter", "runs/t") == (
        "--adapter: the run runs/t trained every weight; export it and give the export as the model"
    )


@pytest.mark.parametrize("kind", ["shapes", "digits"])
def test_half_a_character_in_a_prompt_is_one_sentence_before_the_model(tmp_path, nothing_loaded, refused, kind):
    (tmp_path / "p.jsonl").write_text(r'{"prompt": "a \ud800"}')
    for asked, place in ((["--prompt", "a \udcff"], "--prompt"), (["--prompts", "p.jsonl"], "p.jsonl:1")):
        assert refused("sample", kind, *asked, "--out", "out").startswith(f"{place}: the text 'a \\u")


def test_sample_writes_pictures_and_a_gallery_shows_them(workplace, tiny_model, printed, refused):
    words = ["sample", tiny_model, "--prompt", "a red circle", "--prompt", "a blue square", "--seed", "5", "--out", "o"]
    printed(*words, *ARGUMENTS)
    lines = [json.loads(line) for line in Path("o/manifest.jsonl").read_text().splitlines()]
    assert [(line["prompt"], line["seed"]) for line in lines] == [("a red circle", 5), ("a blue square", 6)]
    refused(*words, *ARGUMENTS)
    printed("gallery", "o", "--out", "page.html")
    page = Path("page.html").read_text()
    assert page.count("data:image/webp") == 2
    assert "a blue square" in page


def test_sample_applies_an_exported_adapter(trained, tiny_model):
    main(["export", "runs/t", "--out", "lora"])
    words = ["sample", str(tiny_model), "--prompt", "a red circle", *ARGUMENTS, "--out"]
    main([*words, "with", "--adapter", "lora"])
    main([*words, "without"])
    adapted = Path("with/0000.png").read_bytes()
    assert adapted == Path("runs/t/samples/step-000002/0000.png").read_bytes()
    assert Path("without/0000.png").read_bytes() == Path("runs/t/samples/step-000000/0000.png").read_bytes()
    assert adapted != Path("without/0000.png").read_bytes()
