"""`flowgrpo sample` on flow models, and what is refused before any model."""

import json
from pathlib import Path

import pytest
from runs import CALL

from flowgrpo.cli import main


@pytest.mark.parametrize(
    ("kind", "file", "content"),
    [
        ("shapes", "pytorch_lora_weights.safetensors", b"\x40"),
        ("digits", "adapter_model.safetensors", b"\x40" + b"\0" * 7 + b"{"),
        ("digits", "adapter_config.json", b'{"r": '),
    ],
)
def test_an_adapter_that_was_cut_off_is_one_sentence_before_the_model(
    tmp_path, monkeypatch, unloaded, capsys, kind, file, content
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "flowgrpo.mdlm.outputs.sampling.load_text_policy", lambda *a: pytest.fail("the model was loaded")
    )
    (tmp_path / "adapter").mkdir()
    if kind == "digits":
        (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
        (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"\x02" + b"\0" * 7 + b"{}")
    (tmp_path / "adapter" / file).write_bytes(content)
    assert main(["sample", kind, "--prompt", "a", "--out", "out", "--adapter", "adapter"]) == 2
    told = capsys.readouterr().err
    assert f"adapter/{file}" in told
    assert told.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["shapes", "digits"])
def test_half_a_character_in_a_prompt_is_one_sentence_before_the_model(tmp_path, monkeypatch, unloaded, capsys, kind):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "flowgrpo.mdlm.outputs.sampling.load_text_policy", lambda *a: pytest.fail("the model was loaded")
    )
    (tmp_path / "p.jsonl").write_text(r'{"prompt": "a \ud800"}')
    for asked, place in ((["--prompt", "a \udcff"], "--prompt"), (["--prompts", "p.jsonl"], "p.jsonl:1")):
        assert main(["sample", kind, *asked, "--out", "out"]) == 2
        assert capsys.readouterr().err.startswith(f"flowgrpo: {place}: the text 'a \\u")


def test_sample_writes_pictures_and_a_gallery_shows_them(workplace, tiny_model, capsys):
    call = [f"{k}={v}" for k, v in CALL.items()]
    arguments = [
        "sample",
        str(tiny_model),
        "--prompt",
        "a red circle",
        "--prompt",
        "a blue square",
        "--seed",
        "5",
        "--out",
        "o",
    ]
    assert main([*arguments, *call]) == 0
    lines = [json.loads(line) for line in Path("o/manifest.jsonl").read_text().splitlines()]
    assert [(line["prompt"], line["seed"]) for line in lines] == [("a red circle", 5), ("a blue square", 6)]
    assert main([*arguments, *call]) == 2
    assert main(["gallery", "o", "--out", "page.html"]) == 0
    page = Path("page.html").read_text()
    assert page.count("data:image/webp") == 2
    assert "a blue square" in page


def test_sample_applies_an_exported_adapter(trained, tiny_model):
    main(["export", "runs/t", "--out", "lora"])
    call = [f"{k}={v}" for k, v in CALL.items()]
    main(["sample", str(tiny_model), "--prompt", "a red circle", "--out", "with", "--adapter", "lora", *call])
    main(["sample", str(tiny_model), "--prompt", "a red circle", "--out", "without", *call])
    adapted = Path("with/0000.png").read_bytes()
    assert adapted == Path("runs/t/samples/step-000002/0000.png").read_bytes()
    assert Path("without/0000.png").read_bytes() == Path("runs/t/samples/step-000000/0000.png").read_bytes()
    assert adapted != Path("without/0000.png").read_bytes()
