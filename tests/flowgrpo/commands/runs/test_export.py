"""What is exported of a run goes into stock pipelines, and its card tells how."""

import json
from pathlib import Path

import pytest
import tiny
import torch
import yaml
from conftest import copy_run
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from PIL import Image, ImageChops
from runs import CALL
from safetensors.torch import save_file

from flowgrpo.cli import main
from flowgrpo.flow.pipeline.loading.load import load_policy


@pytest.mark.parametrize("lora", [True, False])
def test_an_export_loads_into_a_fresh_stock_pipeline(workplace, finished, tiny_model, printed, lora):
    if lora:
        copy_run(finished, workplace)
    else:
        assert main(["train", "tiny.yaml", "model.lora=null", "train.learning_rate=0.001"]) == 0
    done = printed("export", "runs/t", "--out", "out", "--format", "json")
    assert (done["step"], done["kind"]) == (2, "lora" if lora else "full")
    place = tiny_model if lora else workplace / "out"
    pipe = StableDiffusion3Pipeline.from_pretrained(place, text_encoder_3=None, tokenizer_3=None)
    pipe.set_progress_bar_config(disable=True)
    stock = pipe("a red circle", generator=torch.Generator().manual_seed(0), output_type="pt", **CALL).images[0]
    if lora:
        pipe.load_lora_weights(str(workplace / "out"))
    image = pipe("a red circle", generator=torch.Generator().manual_seed(0), output_type="pt", **CALL).images[0]
    assert (not torch.equal(image, stock)) is lora
    last = [json.loads(line) for line in (workplace / "runs/t/samples/manifest.jsonl").read_text().splitlines()][-2]
    assert (last["prompt"], last["seed"], last["step"]) == ("a red circle", 0, 2)
    assert image[0].mean().item() == pytest.approx(last["rewards"]["redness"], abs=1e-6)
    assert {file.stat().st_mode for file in (workplace / "out").rglob("*.*") if file.is_file()} == {
        (workplace / "out" / "README.md").stat().st_mode
    }
    card = (workplace / "out" / "README.md").read_text()
    assert ("load_lora_weights" in card) is lora
    assert type(pipe.scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"


def test_the_card_and_the_settings_say_what_others_need(workplace, tiny_model):
    main(["train", "tiny.yaml", "train.iterations=1", "train.updates=1", "eval.call={num_inference_steps: 6}"])
    (tiny_model / "README.md").write_text("---\nlicense: mit\n---\n")
    try:
        assert main(["export", "runs/t", "--out", "out", "--comfyui"]) == 0
    finally:
        (tiny_model / "README.md").unlink()
    page = Path("out/README.md").read_text()
    front = yaml.safe_load(page.split("---\n")[1])
    assert front == {
        "library_name": "diffusers",
        "license": "mit",
        "pipeline_tag": "text-to-image",
        "tags": ["flowgrpo", "reinforcement-learning", "lora"],
        "widget": [
            {"text": prompt, "output": {"url": f"sample-{i}.png"}}
            for i, prompt in enumerate(Path("prompts.txt").read_text().splitlines())
        ],
    }
    assert "`comfyui/t.safetensors`" in page
    assert "| prompt | seed | sample before training | sample |" in page
    kept = Path("runs/t/samples/step-000000")
    for i in range(2):
        assert Path(f"out/before-{i}.png").read_bytes() == (kept / f"{i:04d}.png").read_bytes()
        assert Path(f"out/sample-{i}.png").read_bytes() != Path(f"out/before-{i}.png").read_bytes()
    told = json.loads(Path("out/sampler.json").read_text())
    assert (told["pipeline"], told["sampler"], told["scheduler"]["shift"]) == ("StableDiffusion3Pipeline", "euler", 3.0)
    assert told["lora"] == {"rank": 2, "alpha": 4, "strength": 1.0}
    assert told["call"] == {**CALL, "num_inference_steps": 6}  # those of evaluation
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(6)
    assert told["sigmas"] == scheduler.sigmas.tolist()


def test_full_weights_are_called_as_the_run_called_them_unless_a_config_says_otherwise(workplace, capsys):
    main(["train", "tiny.yaml", "model.lora=null", "train.iterations=1", "eval.call={num_inference_steps: 6}"])
    assert main(["export", "runs/t", "--out", "out"]) == 0
    assert load_policy("out").call == {**CALL, "num_inference_steps": 6}
    assert load_policy("out", call={"height": 32}).call == {**CALL, "num_inference_steps": 6, "height": 32}
    Path("out/sampler.json").write_text("[]")
    assert main(["plan", "tiny.yaml", "model.path=out"]) == 2
    assert main(["train", "tiny.yaml", "model.path=out", "run.name=next"]) == 2
    assert "out/sampler.json: it has no `call`" in capsys.readouterr().err
    assert not Path("runs/next").exists()


def test_the_settings_tell_the_largest_rank_of_a_lora_that_a_run_started_from(workplace):
    attention, tensors = tiny.sd3().transformer.transformer_blocks[0].attn, {}
    for layer, rank in (("to_q", 2), ("to_k", 5), ("to_v", 2)):
        weight, name = getattr(attention, layer).weight, f"transformer.transformer_blocks.0.attn.{layer}"
        tensors[f"{name}.lora_A.weight"] = torch.ones(rank, weight.shape[1])
        tensors[f"{name}.lora_B.weight"] = torch.zeros(weight.shape[0], rank)
    save_file(tensors, "begun.safetensors")
    assert (
        main(["train", "tiny.yaml", "model.lora={path: begun.safetensors}", "train.iterations=1", "train.updates=1"])
        == 0
    )
    assert main(["export", "runs/t", "--out", "out"]) == 0
    assert json.loads(Path("out/sampler.json").read_text())["lora"] == {"rank": 5, "strength": 1.0}


def test_the_cards_code_reproduces_the_cards_picture(trained, monkeypatch):
    main(["export", "runs/t", "--out", "out"])
    names = {}
    monkeypatch.chdir("out")
    exec(Path("README.md").read_text().split("```python\n")[1].split("```")[0], names)
    expected = Image.open("sample-0.png").convert("RGB")
    assert max(high for _, high in ImageChops.difference(names["image"].convert("RGB"), expected).getextrema()) <= 1
