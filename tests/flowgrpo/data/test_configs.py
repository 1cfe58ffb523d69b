"""Every built-in config for a real model, trained for two iterations on a tiny model of the same classes."""

import json
from pathlib import Path

import pytest
from released import released
from zoo import SPECIMENS

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.data import configs
from flowgrpo.training.report import read_metrics

FLOW = {
    "flux1-24gb": "FluxPipeline",
    "flux1-dev": "FluxPipeline",
    "qwen-image": "QwenImagePipeline",
    "sd35-large": "StableDiffusion3Pipeline",
    "sd35-medium": "StableDiffusion3Pipeline",
    "wan21-1.3b": "WanPipeline",
    "wan21-14b": "WanPipeline",
}
TEXT = {"dream-7b": "dream", "llada-1.5": "llada15", "llada-8b": "llada"}
PAGE = Path(__file__).parents[3] / "docs/real_models.md"
# A verifiable reward of the same kind of sample: the config's own needs weights from the hub, or letters that can be read.
STAND_IN = {"geneval": "jpeg_size", "pickscore": "jpeg_size", "ocr": "jpeg_size", "video_ocr": "motion"}
SMALL = [
    "train.iterations=2",
    "train.groups=2",
    "train.group_size=2",
    "train.micro_batch=4",
    "eval.prompts=1",
    "model.lora.rank=2",
]


def trained(folder):
    return [line for line in read_metrics(folder) if line["phase"] == "train"]


@pytest.mark.parametrize("name", FLOW)
def test_a_config_of_pictures_or_videos_trains_as_written_but_for_sizes(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    specimen = SPECIMENS[FLOW[name]]
    specimen.build().save_pretrained("model")
    written = config.load(name)
    sizes = {key: value for key, value in specimen.call.items() if key not in ("num_inference_steps", "guidance_scale")}
    sizes["num_inference_steps"] = min(written.model.call["num_inference_steps"], 10)
    rewards = [{"use": STAND_IN[use.use], "weight": use.weight} for use in written.rewards]
    changed = {"model.path": "model", "model.call": written.model.call | sizes, "rewards": rewards}
    overrides = [f"{key}={json.dumps(value)}" for key, value in changed.items()]
    assert main(["train", name, *overrides, *SMALL, "eval.call.num_inference_steps=4"]) == 0
    lines = trained(tmp_path / "runs" / name)
    assert len(lines) == 2
    for line in lines:
        assert line["policy/grad_norm"] > 0
        assert line["policy/skipped_updates"] == 0
        assert line["policy/max_abs_log_ratio"] == 0


@pytest.mark.parametrize("name", TEXT)
def test_a_config_of_texts_trains_as_written_but_for_sizes(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    released(TEXT[name], tmp_path / "model")
    (tmp_path / "mine.py").write_text(
        "def letters(texts, prompts):\n    return [float(text.count('e')) for text in texts]\n"
    )
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "How many is 3 * 7?", "answer": "21"}) + "\n")
    mine = ["rewards=[./mine.py:letters]", "eval_rewards=[]", "prompts.train=rows.jsonl", "prompts.eval=rows.jsonl"]
    length = ["model.length=32", "algorithm.decoder.steps=8", "eval.decoder.steps=8", "train.passes=2"]
    assert main(["train", name, "model.path=model", *mine, *length, *SMALL]) == 0
    lines = trained(tmp_path / "runs" / name)
    assert len(lines) == 2
    for line in lines:
        assert line["policy/grad_norm"] > 0
        assert line["policy/skipped_updates"] == 0


def test_every_config_is_trained_here_and_says_what_it_needs():
    assert sorted([*FLOW, *TEXT]) == configs.names()
    for name in configs.names():
        said = configs.head(name)
        assert list(said) == ["about", *configs.LABELS]
        assert all(said.values())
        settings = config.load(name)
        assert settings.run.name == name
        assert settings.model.path in said["Hub"]
        assert f"| `{name}` | {said['about']} | {said['GPU']} | {said['Hub']} |" in PAGE.read_text()
