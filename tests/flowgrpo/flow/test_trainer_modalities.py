"""Training by command on folders of tiny pipelines: videos, edited pictures, sounds; and what export gives back."""

import json

import diffusers
import pytest
import torch
import yaml
from PIL import Image, ImageChops
from read_card import blocks
from zoo import SPECIMENS
from zoo.base import picture

import flowgrpo
from flowgrpo.cli import main
from flowgrpo.data.prompts import Row
from flowgrpo.training.run.run_files import read_manifest


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Write the config of a two-iteration run on a specimen, saved to a folder, and give its path."""
    monkeypatch.chdir(tmp_path)

    def write(name, reward, **changes):
        specimen = SPECIMENS[name]
        specimen.build().save_pretrained("model")
        picture(1).save("fox.png")
        columns = dict.fromkeys(specimen.columns, "fox.png")
        rows = [{"prompt": prompt, **columns} for prompt in specimen.prompts]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        written = {
            "model": {"path": "model", "call": specimen.call, "lora": {"rank": 2, "alpha": 4}},
            "prompts": {"train": "rows.jsonl", "eval": "rows.jsonl"},
            "rewards": [{"use": reward}],
            "algorithm": {"preset": "flow_grpo_fast", "tree": {"size": 2}},
            "train": {"iterations": 2, "groups": 2, "group_size": 2, "micro_batch": 2, "learning_rate": 0.01},
            "eval": {"every": 2, "prompts": 2, "save": 2},
            "run": {"name": "t", "checkpoint": {"every": 2}},
            **changes,
        }
        (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(written))
        return "tiny.yaml"

    return write


@pytest.mark.usefixtures("small_pictures")
@pytest.mark.parametrize(
    ("name", "reward", "suffix"),
    [
        pytest.param("WanPipeline", "motion", ".mp4", marks=pytest.mark.zoo),
        ("QwenImageEditPipeline", "jpeg_size", ".png"),
        ("StableAudio3Pipeline", "loudness", ".wav"),
    ],
)
def test_every_modality_trains_from_the_command_line(config, tmp_path, capsys, name, reward, suffix):
    assert main(["train", config(name, reward)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "runs/t/metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["phase"] == "train"]
    assert len(train) == 2
    assert all(line["policy/max_abs_log_ratio"] == 0 and line["policy/grad_norm"] > 0 for line in train)
    kept = read_manifest(tmp_path / "runs/t/samples")
    assert [line["step"] for line in kept] == [0, 0, 2, 2]
    assert all((tmp_path / "runs/t/samples" / line["file"]).suffix == suffix for line in kept)
    assert (tmp_path / "runs/t/gallery.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    "name", ["FluxPipeline", *(pytest.param(n, marks=pytest.mark.zoo) for n in ("QwenImagePipeline", "WanPipeline"))]
)
def test_a_trained_lora_gives_its_sample_in_a_stock_pipeline_bit_for_bit(config, name):
    train = {"iterations": 1, "groups": 1, "group_size": 2, "updates": 1, "micro_batch": 2, "learning_rate": 0.01}
    reward, brief = "motion" if name.startswith("Wan") else "jpeg_size", {"every": 9, "prompts": 1, "save": 0}
    path = config(name, reward, train=train, eval=brief)
    run = flowgrpo.train(path)
    assert main(["export", "runs/t", "--out", "out"]) == 0
    specimen = SPECIMENS[name]
    trained = run.policy.generate([Row(specimen.prompts[0], 5)])

    fresh = diffusers.DiffusionPipeline.from_pretrained("model", dtype=torch.float32)
    if name.startswith("Wan"):  # it ships UniPC; the policy samples by Euler's method
        fresh.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=fresh.scheduler.config.flow_shift)
    call = {**specimen.call, "output_type": "pt", "return_dict": False}
    before = fresh(prompt=specimen.prompts[0], generator=torch.Generator().manual_seed(5), **call)[0]
    fresh.load_lora_weights("out")
    after = fresh(prompt=specimen.prompts[0], generator=torch.Generator().manual_seed(5), **call)[0]
    assert torch.equal(after, trained)
    assert not torch.equal(after, before)


@pytest.mark.usefixtures("small_pictures")
def test_the_cards_code_opens_a_rows_picture(config, tmp_path, monkeypatch):
    """Cards that exist import the function by its public name, which stays."""
    train = {"iterations": 1, "groups": 1, "group_size": 2, "updates": 1, "micro_batch": 2}
    assert main(["train", config("QwenImageEditPipeline", "jpeg_size", train=train)]) == 0
    assert main(["export", "runs/t", "--out", "out"]) == 0
    names = {}
    exec(blocks((tmp_path / "out" / "README.md").read_text())["python"].replace('"."', '"out"'), names)
    assert names["loaded"]("fox.png").size == picture(1).size
    sample = Image.open("out/sample-0.png").convert("RGB")
    assert max(high for _, high in ImageChops.difference(names["image"].convert("RGB"), sample).getextrema()) <= 1


def test_a_missing_picture_is_one_sentence(config, tmp_path, capsys):
    path = config("QwenImageEditPipeline", "jpeg_size")
    (tmp_path / "fox.png").unlink()
    assert main(["train", path]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
