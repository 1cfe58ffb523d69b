"""`flowgrpo train`: what a run leaves in its folder."""

import json

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from runs import CALL, metrics, weights

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.errors import InputError


def test_a_run_leaves_the_promised_folder(finished):
    run = finished / "runs" / "t"
    files = "config.yaml metrics.jsonl checkpoints/step-000002 samples/manifest.jsonl gallery.html environment.json"
    for name in files.split():
        assert (run / name).exists(), name
    promised = {
        "step", "phase", "reward/mean", "reward/std", "reward/redness/mean", "groups/zero_std_fraction",
        "policy/max_abs_log_ratio", "policy/clip_fraction", "policy/kl", "policy/grad_norm", "cost/model_evaluations",
        "cost/trained_edges", "cost/decoded", "time/rollout", "time/reward", "time/update", "memory/peak_bytes",
    }  # fmt: skip
    for line in metrics(run):
        assert promised <= set(line)
        assert line["policy/max_abs_log_ratio"] == 0
    assert [line["step"] for line in metrics(run, "eval")] == [0, 1, 2]
    manifest = [json.loads(line) for line in (run / "samples" / "manifest.jsonl").read_text().splitlines()]
    assert len(manifest) == 6
    assert set(manifest[0]) == {"file", "prompt", "seed", "step", "sampler", "rewards"}
    assert all((run / "samples" / line["file"]).is_file() for line in manifest)


LOSING = """
from pathlib import Path
def redness(images, prompts):
    over = '"train"' in Path("runs/t/metrics.jsonl").read_text() if Path("runs/t/metrics.jsonl").exists() else False
    lost = [float("nan") if over and prompt == "a green circle" else 0.0 for prompt in prompts]
    return [mean + nan for mean, nan in zip(images[:, 0].mean((1, 2)).tolist(), lost)]
"""


def test_the_last_line_marks_a_held_out_mean_of_fewer_samples(workplace, capsys):
    (workplace / "mine.py").write_text(LOSING)
    assert main(["train", "tiny.yaml", "train.iterations=1", "eval.save=0"]) == 0
    before, after = (line["reward/mean"] for line in metrics(workplace / "runs" / "t", "eval"))
    assert capsys.readouterr().out.splitlines() == [
        f"held-out reward {before:.3f} -> {after:.3f} (n = 3 and 2, so not of the same samples)",
        "run      runs/t",
        "gallery  runs/t/gallery.html",
    ]


def test_a_manifest_line_reproduces_its_picture_in_the_stock_pipeline(finished, tiny_model):
    run = finished / "runs" / "t"
    line = json.loads((run / "samples" / "manifest.jsonl").read_text().splitlines()[1])
    pipe = StableDiffusion3Pipeline.from_pretrained(tiny_model, text_encoder_3=None, tokenizer_3=None)
    pipe.set_progress_bar_config(disable=True)
    image = pipe(
        line["prompt"], generator=torch.Generator().manual_seed(line["seed"]), output_type="pt", **CALL
    ).images[0]
    assert image[0].mean().item() == pytest.approx(line["rewards"]["redness"], abs=1e-5)


def test_evaluation_with_a_call_of_its_own_finds_its_prompts_encoded(workplace, printed):
    options = ["train.iterations=1", "eval.save=0", "model.text_encoders=free"]
    options += ["eval.call={guidance_scale: 3.0, num_inference_steps: 5}"]
    planned = printed("plan", "tiny.yaml", *options, "--format", "json")["evaluation"]
    assert planned == {"model_evaluations": 3 * 5 * 2, "decoded": 3}
    printed("train", "tiny.yaml", *options)
    for line in metrics(workplace / "runs" / "t", "eval"):
        assert {key: line[f"cost/{key}"] for key in planned} == planned


def test_float16_learns_through_a_scaled_loss(workplace):
    assert main(["train", "tiny.yaml", "model.dtype=float16", "eval={every: 2, prompts: 1, save: 0}"]) == 0
    for line in metrics(workplace / "runs" / "t"):
        assert line["policy/grad_norm"] > 0
        assert (line["policy/max_abs_log_ratio"], line["policy/skipped_updates"]) == (0, 0)
    moved = weights(workplace / "runs" / "t", 2)
    assert any(tensor.abs().max() > 0 for name, tensor in moved.items() if "lora_B" in name)


def test_processes_that_do_not_divide_the_samples_are_refused(workplace):
    from flowgrpo.commands.runs import train as run

    said = r"2 groups of 4 samples do not divide into train.updates = 2 parts on 3 processes, take 6"
    with pytest.raises(InputError, match=said):
        run._check_processes(config.load("tiny.yaml", {"train.group_size": 4}), 3)
    with pytest.raises(InputError, match=r"run.processes: 2 processes are started by the command flowgrpo train"):
        run._check_processes(config.load("tiny.yaml", {"run.processes": 2, "train.groups": 4}), 1)
    with pytest.raises(InputError, match=r"run.context_parallel: 3 processes do not divide into groups of 2, take run"):
        run._check_processes(config.load("tiny.yaml", {"run.context_parallel": 2, "train.groups": 6}), 3)
