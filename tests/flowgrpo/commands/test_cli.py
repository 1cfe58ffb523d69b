import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.commands.launch import check_environment
from flowgrpo.errors import InputError
from flowgrpo.flow.methods.presets import PRESETS, PUBLISHED
from flowgrpo.flow.plan import predicted

CALL = {"num_inference_steps": 4, "guidance_scale": 1.0, "height": 16, "width": 16, "max_sequence_length": 1}


def metrics(folder, phase="train"):
    written = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in written if line["phase"] == phase]


def weights(folder, step):
    return load_file(folder / "checkpoints" / f"step-{step:06d}" / "weights.safetensors")


def background(*arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "flowgrpo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def wait_for(path, process, seconds=120):
    for _ in range(seconds * 20):
        if path.exists() or process.poll() is not None:
            return
        time.sleep(0.05)


def test_a_run_leaves_the_promised_folder(workplace, capsys):
    assert main(["train", "tiny.yaml"]) == 0
    run = workplace / "runs" / "t"
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "checkpoints/step-000002",
        "samples/manifest.jsonl",
        "gallery.html",
        "environment.json",
    ):
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
    assert "gallery" in capsys.readouterr().out


def test_a_manifest_line_reproduces_its_picture_in_the_stock_pipeline(workplace, tiny_model):
    main(["train", "tiny.yaml", "train.iterations=1"])
    run = workplace / "runs" / "t"
    line = json.loads((run / "samples" / "manifest.jsonl").read_text().splitlines()[1])
    pipe = StableDiffusion3Pipeline.from_pretrained(tiny_model, text_encoder_3=None, tokenizer_3=None)
    pipe.set_progress_bar_config(disable=True)
    image = pipe(
        line["prompt"], generator=torch.Generator().manual_seed(line["seed"]), output_type="pt", **CALL
    ).images[0]
    assert image[0].mean().item() == pytest.approx(line["rewards"]["redness"], abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "tiny.yaml", "train.iteration=3"], "train.iteration: unknown key, did you mean 'iterations'?"),
        (["train", "tiny.yaml", "train.iterations=ten"], "train.iterations: 'ten' is wrong"),
        (["train", "nothing.yaml"], "nothing.yaml: no such config file"),
        (["train", "tiny.yaml", "prompts.train=no.txt"], "prompts.train: there is no file no.txt"),
        (["train", "tiny.yaml", "rewards=[{use: nothing}]"], "there is no reward 'nothing'"),
        (["train", "tiny.yaml", "rewards=[{use: './no.py:f'}]"], "there is no file no.py"),
        (["train", "tiny.yaml", "rewards=[{use: './odd.py:nan'}]"], "the reward 'nan' returned NaN or infinity"),
        (
            ["train", "tiny.yaml", "rewards=[{use: './odd.py:short'}]"],
            "the reward 'short' returned 1 values for 2 samples",
        ),
        (
            ["train", "tiny.yaml", "rewards=[{use: './odd.py:raises'}]"],
            "the reward 'raises' failed on two synthetic samples",
        ),
        (["train", "tiny.yaml", "rewards=['./odd.py']"], "it has nan, short, raises"),
        (["train", "tiny.yaml", "rewards=['./odd.py:raises']"], "KeyError: 'x' at odd.py:3"),
        (
            ["train", "tiny.yaml", "rewards=[{use: './boom.py:f', only: {task: ocr}}]", "prompts.train=rows.jsonl"],
            "rewards: 'f' is only for task = 'ocr', no training prompt has that; did you mean 'ocr2'?",
        ),
        (
            [
                "train",
                "tiny.yaml",
                "rewards=[{use: './boom.py:f', only: {task: draw, n: 2}}]",
                "prompts.train=rows.jsonl",
            ],
            "rewards: 'f' is only for {'task': 'draw', 'n': 2}, no training prompt has all of that",
        ),
        (
            ["train", "tiny.yaml", "eval_rewards=[{use: './boom.py:f', only: {n: 1}}]", "prompts.train=rows.jsonl"],
            "eval_rewards: 'f' is only for n = 1, no held-out prompt has that",
        ),
        (["train", "tiny.yaml", "rewards=[{use: jpeg_size}, {use: jpeg_size}]"], "two rewards are named 'jpeg_size'"),
        (
            ["train", "tiny.yaml", "rewards=[{use: shapes}]", "prompts.train=odd.txt"],
            "the shapes reward cannot read the prompt 'a red dog'",
        ),
        (["train", "tiny.yaml", "model.path=./nowhere"], "model.path: there is no folder './nowhere'"),
        (["train", "tiny.yaml", "model.path=shape"], "did you mean 'shapes'?"),
        (
            ["train", "tiny.yaml", "model.call.steps=3"],
            "model.call.steps: StableDiffusion3Pipeline has no such argument",
        ),
        (["train", "tiny.yaml", "model.lora.targets=[to_w]"], "model.lora.targets: no linear layer is named 'to_w'"),
        (
            ["train", "tiny.yaml", "algorithm.tree={name: window, size: 9}"],
            "algorithm.tree.size: a window of 9 does not fit",
        ),
        (
            ["train", "tiny.yaml", "eval.call.guidnace_scale=3"],
            "eval.call.guidnace_scale: StableDiffusion3Pipeline has no",
        ),
        (
            ["plan", "tiny.yaml", "eval.call.guidnace_scale=3"],
            "eval.call.guidnace_scale: StableDiffusion3Pipeline has no",
        ),
        (["plan", "tiny.yaml", "prompts.train=no.txt"], "prompts.train: there is no file no.txt"),
        (
            ["train", "tiny.yaml", "model.call.num_inference_steps=ten"],
            "num_inference_steps: 'ten' is not a number of steps",
        ),
        (
            ["plan", "tiny.yaml", "model.call.num_inference_steps=10000000"],
            "num_inference_steps: 10000000 is not a number of steps from 1 to 10000",
        ),
        (["train", "tiny.yaml", "model.call.height=17"], "model.call: StableDiffusion3Pipeline refuses it: `height`"),
        (["train", "tiny.yaml", "model.call.height=x"], "model.call: StableDiffusion3Pipeline refuses it"),
        (
            [
                "train",
                "tiny.yaml",
                "model.call.skip_guidance_layers=[0]",
                "model.call.skip_layer_guidance_stop=1.0",
                "model.call.guidance_scale=3.0",
            ],
            "model.call.skip_guidance_layers: StableDiffusion3Pipeline counts its own steps for it",
        ),
        (
            ["train", "tiny.yaml", "algorithm.kernel=cps", "algorithm.tree.last_step=sde"],
            "algorithm.tree.last_step: cps has no noise at the last step",
        ),
        (
            ["plan", "tiny.yaml", "algorithm.preset=tempflow", "train.group_size=16"],
            "train.group_size: 16 does not divide by the 6 algorithm.tree.branches children of each seed, take 12 or 18",
        ),
        (
            ["plan", "tiny.yaml", "algorithm.preset=branch_grpo", "train.group_size=15"],
            "train.group_size: 15 does not divide by the 2 leaves of a tree with algorithm.tree.factor 2, take 14 or 16",
        ),
        (
            ["train", "tiny.yaml", "algorithm.preset=branch_grpo", "algorithm.tree.splits=[0, 3]"],
            "algorithm.tree.splits: [0, 3] are not different steps among the 3 stochastic ones, 0 to 2",
        ),
        (
            ["train", "tiny.yaml", "algorithm.preset=branch_grpo", "train.group_size=16"],
            "algorithm.tree.splits: [0, 1, 2, 3], which a group of 16 asks for unless they are given, are not different",
        ),
        (
            ["train", "tiny.yaml", "algorithm.preset=branch_grpo", "algorithm.tree.splits=[1, 1]"],
            "algorithm.tree.splits: [1, 1] are not different steps",
        ),
        (
            ["train", "tiny.yaml", "algorithm.tree={name: brush, branches: 2, profile: [2, 2, 2, 2]}"],
            "algorithm.tree.profile: [2, 2, 2, 2] are not the numbers of children of at most 3 stochastic steps",
        ),
        (
            ["train", "tiny.yaml", "algorithm.kernel.level=[0.7, 0.6]"],
            "algorithm.kernel.level: 2 levels for 4 steps, take 4, or 3 if the last step is ODE",
        ),
        (
            ["train", "tiny.yaml", "algorithm.kernel.level=[0.9, 0.8, 0.7, 0.6, 0.5]"],
            "algorithm.kernel.level: 5 levels for 4 steps, take 4, or 3 if the last step is ODE",
        ),
        (
            ["train", "tiny.yaml", "run.trackers=[tensorbord]"],
            "there is no tracker 'tensorbord', did you mean 'tensorboard'?",
        ),
        (["train", "tiny.yaml", "run.trackers=[swanlab]"], "run.trackers: swanlab is not installed here"),
        (["train", "tiny.yaml", "run.resume=true"], "run.resume: there is no run in runs/t"),
        (["plan", "tiny.yaml", "algorithm.kernel=cpss"], "algorithm.kernel: 'cpss' is unknown, did you mean 'cps'?"),
        (["plan", "tiny.yaml", "model.path=./nowhere"], "model.path: there is no folder './nowhere'"),
        (["sample", "shapes", "--out", "o"], "give either --prompt TEXT"),
        (["sample", "shapes", "--out", "o", "--prompts", "no.txt"], "--prompts: there is no file no.txt"),
        (
            ["sample", "shapes", "--out", "o", "--prompt", "a", "--adapter", "x"],
            "--adapter x: there is no pytorch_lora_weights",
        ),
        (["gallery", "nowhere"], "nowhere: there is no such folder"),
        (["gallery", "."], "there are no samples to show"),
        (["export", "nowhere", "--out", "o"], "nowhere: there is no run here"),
        (["rewards", "shape"], "there is no reward 'shape', did you mean 'shapes'?"),
        (["trai", "tiny.yaml"], "No such command 'trai'"),
        (["train"], "Missing argument"),
        (["plan", "tiny.yaml", "--format", "xml"], "'xml' is not one of"),
    ],
)
def test_wrong_input_is_one_sentence_and_status_2(workplace, capsys, arguments, said):
    (workplace / "odd.txt").write_text("a red dog\n")
    (workplace / "odd.py").write_text(
        "def nan(images, prompts): return [float('nan')] * len(prompts)\n"
        "def short(images, prompts): return [1.0]\n"
        "def raises(images, prompts): raise KeyError('x')\n"
    )
    (workplace / "boom.py").write_text("raise SystemError('this must not be loaded')\n")
    rows = ({"prompt": "a", "task": "ocr2", "n": 2}, {"prompt": "b", "task": "draw", "n": 1})
    (workplace / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not (workplace / "runs").exists()


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "mixed precision (ACCELERATE_MIXED_PRECISION=bf16; set model.dtype)"),
        (
            {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
            "gradient accumulation (ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4; set train.micro_batch)",
        ),
        (
            {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": "fp16"},
            "mixed precision (ACCELERATE_MIXED_PRECISION=fp16; set model.dtype) and FSDP (ACCELERATE_USE_FSDP=true; each ",
        ),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true"},
            "DeepSpeed (ACCELERATE_USE_DEEPSPEED=true; each process holds the whole",
        ),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron-LM (ACCELERATE_USE_MEGATRON_LM=true; each process holds"),
        (
            {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"},
            "a parallelism config (ACCELERATE_USE_PARALLELISM_CONFIG=true; ",
        ),
        (
            {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"},
            "compilation (ACCELERATE_DYNAMO_BACKEND=INDUCTOR; flow models have mo",
        ),
    ],
)
def test_what_accelerate_s_environment_asks_for_in_vain_is_refused(workplace, capsys, monkeypatch, environment, said):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "tiny.yaml"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"flowgrpo: accelerate's environment asks for {said}")
    assert told.count("\n") == 1
    assert not (workplace / "runs").exists()


def test_what_accelerate_launch_sets_for_nothing_is_let_through():
    """What accelerate 1.15 puts into the environment of `accelerate launch` without a config."""
    plain = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_USE_FSDP": "false"}
    check_environment({**plain, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1", "ACCELERATE_CPU_AFFINITY": "1"})


MISFITS = [
    (["algorithm.credit=step_gain"], "algorithm.credit: step_gain needs a value of every state, take the tree twigs"),
    (
        ["algorithm.credit=siblings"],
        "algorithm.credit: siblings needs a tree whose branches are finished by ODE, such as",
    ),
    (["algorithm.credit=discounted_value"], "algorithm.credit: discounted_value needs a value of every state, take"),
    (
        ["algorithm.preset=branch_grpo", "algorithm.credit=terminal"],
        "algorithm.credit: terminal needs a tree whose trajectories share no edge, such as chain; for others there are",
    ),
    (
        ["algorithm.preset=dense_grpo", "algorithm.tree.root=false"],
        "algorithm.credit: step_gain needs a value of every",
    ),
    (["algorithm.kernel.calibrate={rounds: 2}"], "algorithm.kernel.calibrate: it counts the gains of steps, for which"),
    (
        ["algorithm.preset=vgpo", "algorithm.kernel.calibrate={rounds: 2}"],
        "algorithm.kernel.calibrate: it counts the gains of steps, for which every state needs a value; take the tree",
    ),
    (
        ["algorithm.preset=branch_grpo", "algorithm.tree.splits=[0, 2]", "algorithm.tree.prune={rule: extremes}"],
        "algorithm.tree.prune: no stochastic step follows the split at 2, so nothing can be left out",
    ),
    (
        ["algorithm.preset=branch_grpo", "algorithm.credit.weights=path", "algorithm.kernel.log_prob=constant_free"],
        "algorithm.credit.weights: path needs algorithm.kernel.log_prob mean or sum, a density",
    ),
]


@pytest.mark.parametrize("command", ["plan", "train"])
def test_axes_that_do_not_fit_each_other_are_refused_before_any_weights_load(workplace, tiny_model, capsys, command):
    shutil.copytree(tiny_model, "hollow", ignore=shutil.ignore_patterns("*.safetensors"))
    for options, said in MISFITS:
        assert main([command, "tiny.yaml", "model.path=./hollow", *options]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith(f"flowgrpo: {said}")
        assert captured.err.count("\n") == 1
        assert captured.out == ""
    assert main(["train", "tiny.yaml", "model.path=./hollow"]) == 2  # what fits gets as far as the weights
    assert "model.path: ./hollow could not be loaded" in capsys.readouterr().err
    assert not (workplace / "runs").exists()


def test_an_existing_run_is_not_overwritten_and_a_resume_goes_on_as_it_began(workplace, capsys):
    assert main(["train", "tiny.yaml", "train.iterations=1"]) == 0
    assert main(["train", "tiny.yaml"]) == 2
    assert "runs/t exists already; set run.resume=true" in capsys.readouterr().err
    assert main(["train", "tiny.yaml", "run.resume=true", "train.learning_rate=0.5"]) == 2
    assert "train.learning_rate was 0.01 in runs/t and is 0.5 now" in capsys.readouterr().err
    assert main(["train", "tiny.yaml", "run.resume=true", "run.seed=5"]) == 2
    assert "run.seed was 0 in runs/t and is 5 now" in capsys.readouterr().err
    assert main(["train", "tiny.yaml", "run.resume=true", "train.iterations=3"]) == 0
    assert [line["step"] for line in metrics(workplace / "runs" / "t")] == [1, 2, 3]


def test_six_iterations_equal_three_and_a_kill_and_three(workplace):
    steps = ["train.iterations=6", "run.checkpoint.every=3"]
    assert main(["train", "tiny.yaml", *steps, "run.name=whole"]) == 0
    run = workplace / "runs" / "killed"
    process = background("train", "tiny.yaml", *steps, "run.name=killed")
    wait_for(run / "checkpoints" / "step-000003", process)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert main(["train", "tiny.yaml", *steps, "run.name=killed", "run.resume=true"]) == 0
    whole, resumed = weights(workplace / "runs" / "whole", 6), weights(run, 6)
    assert whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4, 5, 6]
    files = [json.loads(line)["file"] for line in (run / "samples" / "manifest.jsonl").read_text().splitlines()]
    assert len(files) == len(set(files)) == 7 * 2


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_finishes_the_step_and_says_how_to_go_on(workplace, sent):
    process = background("train", "tiny.yaml", "train.iterations=500", "run.checkpoint.every=500", "eval.every=500")
    wait_for(workplace / "runs" / "t" / "metrics.jsonl", process)
    time.sleep(0.5)
    process.send_signal(sent)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "go on with: flowgrpo train tiny.yaml train.iterations=500" in said
    assert said.rstrip().endswith("run.resume=true")
    assert "Traceback" not in said
    run = workplace / "runs" / "t"
    last = metrics(run)[-1]["step"]
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{last:06d}"]
    assert (run / "gallery.html").read_text().count("<figure") == 2  # of the one evaluation there was


@pytest.mark.parametrize(
    ("method", "drift"),
    [
        (["algorithm.preset=flow_grpo"], 0.0),
        (
            [
                "algorithm.preset=vgpo",
                "algorithm.tree.root=true",
                "algorithm.kernel.calibrate={rounds: 2}",
                "train.split=samples",
            ],
            0.0,
        ),
        (
            [
                "algorithm.preset=branch_grpo",
                "algorithm.tree.prune={rule: extremes}",
                "train.split=edges",
                "train.updates=3",
            ],
            1e-6,
        ),
    ],
)
def test_two_processes_give_the_weights_of_one(workplace, method, drift):
    options = ["train.groups=4", "train.micro_batch=4", "eval.every=2", "eval.save=0", *method]
    assert main(["train", "tiny.yaml", *options, "run.name=one"]) == 0
    process = background("train", "tiny.yaml", *options, "run.name=two", "run.processes=2")
    _, said = process.communicate(timeout=180)
    assert process.returncode == 0, said
    one, two = (workplace / "runs" / name for name in ("one", "two"))
    of_two = weights(two, 2)
    for name, tensor in weights(one, 2).items():
        torch.testing.assert_close(of_two[name], tensor, rtol=1e-3, atol=2e-5)
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert b["policy/max_abs_log_ratio"] <= drift
        for key in ("reward/mean", "reward/std", "cost/model_evaluations", "cost/trained_edges", "cost/decoded"):
            assert b[key] == pytest.approx(a[key], abs=1e-4), key
    assert calibration(two) == calibration(one)
    assert len(calibration(one)) == ("algorithm.preset=vgpo" in method)


def calibration(folder):
    """Levels and counts of each round, and the cost that was told; nothing for a run without."""
    return [
        (json.loads((folder / "calibration.json").read_text())["rounds"], line["cost/model_evaluations"])
        for line in metrics(folder, "calibration")
    ]


def test_wrong_input_in_several_processes_is_still_status_2(workplace):
    process = background("train", "tiny.yaml", "train.groups=4", "run.processes=2", "model.path=./nowhere")
    _, said = process.communicate(timeout=180)
    assert process.returncode == 2
    assert said.count("there is no folder") == 1
    assert "Traceback" not in said


@pytest.mark.parametrize("lora", [True, False])
def test_an_export_loads_into_a_fresh_stock_pipeline(workplace, tiny_model, capsys, lora):
    options = [] if lora else ["model.lora=null", "train.learning_rate=0.001"]
    assert main(["train", "tiny.yaml", *options]) == 0
    assert main(["export", "runs/t", "--out", "out", "--format", "json"]) == 0
    printed = json.loads(capsys.readouterr().out[-400:].split("gallery")[-1].partition("\n")[2])
    assert printed["step"] == 2
    assert printed["kind"] == ("lora" if lora else "full")
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
    card = (workplace / "out" / "README.md").read_text()
    assert ("load_lora_weights" in card) is lora
    assert type(pipe.scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"


def test_the_cards_code_reproduces_the_cards_picture(workplace):
    main(["train", "tiny.yaml"])
    main(["export", "runs/t", "--out", "out"])
    code = (workplace / "out" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    names = {}
    here = Path.cwd()
    os.chdir("out")
    try:
        exec(code, names)
    finally:
        os.chdir(here)
    from PIL import Image, ImageChops

    expected = Image.open("out/sample-0.png").convert("RGB")
    assert max(high for _, high in ImageChops.difference(names["image"].convert("RGB"), expected).getextrema()) <= 1


def test_evaluation_with_a_call_of_its_own_finds_its_prompts_encoded(workplace, capsys):
    options = [
        "train.iterations=1",
        "eval.save=0",
        "model.text_encoders=free",
        "eval.call={guidance_scale: 3.0, num_inference_steps: 5}",
    ]
    assert main(["plan", "tiny.yaml", *options, "--format", "json"]) == 0
    planned = json.loads(capsys.readouterr().out)["evaluation"]
    assert planned == {"model_evaluations": 3 * 5 * 2, "decoded": 3}
    assert main(["train", "tiny.yaml", *options]) == 0
    for line in metrics(workplace / "runs" / "t", "eval"):
        assert {key: line[f"cost/{key}"] for key in planned} == planned


def test_float16_learns_through_a_scaled_loss(workplace):
    options = ["model.dtype=float16", "train.iterations=2", "rewards=[{use: './mine.py:redness'}]"]
    assert main(["train", "tiny.yaml", *options]) == 0
    for line in metrics(workplace / "runs" / "t"):
        assert line["policy/max_abs_log_ratio"] == 0
        assert line["policy/grad_norm"] > 0
        assert line["policy/skipped_updates"] == 0
    moved = weights(workplace / "runs" / "t", 2)
    assert any(tensor.abs().max() > 0 for name, tensor in moved.items() if "lora_B" in name)


def test_processes_that_do_not_divide_the_groups_are_refused(workplace):
    from flowgrpo.commands import train as run

    with pytest.raises(InputError, match=r"2 groups do not divide into train.updates = 2 parts on 2 processes, take 4"):
        run._check_processes(config.load("tiny.yaml"), 2)
    with pytest.raises(InputError, match=r"run.processes: 2 processes are started by the command flowgrpo train"):
        run._check_processes(config.load("tiny.yaml", {"run.processes": 2, "train.groups": 4}), 1)


def test_plan_predicts_what_a_run_counts(workplace, capsys):
    for preset in ("flow_grpo", "flow_grpo_fast", "mix_grpo", "dance_grpo"):
        options = [f"algorithm.preset={preset}", "algorithm.objective.kl.beta=0.01", "model.call.guidance_scale=2.0"]
        options += ["algorithm.tree.size=2"] if preset in ("flow_grpo_fast", "mix_grpo") else []
        assert main(["plan", "tiny.yaml", *options, "--format", "json"]) == 0
        planned = json.loads(capsys.readouterr().out)
        assert main(["train", "tiny.yaml", *options, f"run.name={preset}"]) == 0
        capsys.readouterr()
        for line in metrics(workplace / "runs" / preset):
            assert planned["model_evaluations"]["rollout"] == line["cost/rollout_evaluations"]
            assert planned["model_evaluations"]["update"] == line["cost/update_evaluations"]
            assert sum(planned["model_evaluations"].values()) == line["cost/model_evaluations"]
            assert planned["geometry"]["trained_edges"] == line["cost/trained_edges"]
            assert planned["decoded"] == line["cost/decoded"]
        assert planned["preset"] == preset
        assert set(planned["axes"]) == {"tree", "kernel", "credit", "baseline", "objective"}
        assert planned["reward_calls"] == 8


SHAPES = Path(__file__).parents[3] / "configs" / "shapes.yaml"


@pytest.mark.parametrize("preset", PRESETS)
def test_every_method_can_be_planned_on_the_embedded_model(capsys, preset):
    options = [f"algorithm.preset={preset}", "train.group_size=24", "--format", "json"]
    assert main(["plan", str(SHAPES), *options]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["preset"] == preset
    assert planned["axes"] == {axis: row["name"] for axis, row in PRESETS[preset].items()}
    cost = predicted(config.load(SHAPES, options[:2]), 10)
    assert planned["model_evaluations"] == {"rollout": cost.rollout, "update": cost.update}
    assert (planned["geometry"]["trained_edges"], planned["decoded"]) == (cost.trained_edges, cost.decoded)
    assert planned["reward_calls"] == planned["decoded"]
    assert planned["picture"][0].split() == [str(step) for step in range(11)]
    assert planned["picture"][1].startswith("o")
    # lines that end in a decode: one, or one for each step that branches or is measured
    several = {"tempflow": 9, "tempflow_fast": 3, "dense_grpo": 10, "stepwise_flow_grpo": 10, "vgpo": 9}
    assert sum(line.endswith("*") for line in planned["picture"]) == several.get(preset, 1)
    assert {key: both["source"] for key, both in planned["published"].items()} == PUBLISHED[preset]
    assert planned["warnings"] == []
    rounds = 10 if preset == "dense_grpo" else 0
    assert planned["calibration"] == {"model_evaluations": rounds * cost.rollout, "decoded": rounds * cost.decoded}


def test_plan_reads_for_people_too(workplace, capsys):
    assert main(["plan", "tiny.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "flow_sde" in shown
    assert "\n  0   1   2   3   4\n  o~~~o~~~o~~~o---*\n" in shown
    assert "* decoded   ~ stochastic, trained" in shown
    words = " ".join(shown.split())
    assert "2 groups x 4 = 8 trajectories from 4 roots each, 2 updates, split by groups" in words
    assert "published num_inference_steps 10 (here 4), groups 48 (here 2), group_size 24 (here 4), updates 2" in words
    assert "warning" not in words
    uneven = ["algorithm.kernel={name: cps, log_prob: mean}", "model.call.num_inference_steps=10"]
    assert main(["plan", "tiny.yaml", *uneven]) == 0
    assert "warning of the steps trained, that from sigma" in " ".join(capsys.readouterr().out.split())
    assert not (workplace / "runs").exists()


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


def test_rewards_of_samples_meet_the_columns_of_their_prompts(workplace, tiny_model, capsys):
    Path("rows.jsonl").write_text('{"prompt": "a red circle", "wanted": 3}\n{"prompt": "a blue square"}\n')
    call = [f"{k}={v}" for k, v in CALL.items()]
    assert main(["sample", str(tiny_model), "--prompts", "rows.jsonl", "--out", "o", *call]) == 0
    Path("wanted.py").write_text("def wanted(images, prompts, wanted):\n    return wanted\n")
    capsys.readouterr()
    assert main(["score", "./wanted.py:wanted", "--samples", "o", "--format", "json"]) == 0
    assert [line["rewards"]["wanted"] for line in json.loads(capsys.readouterr().out)] == [3, None]


def test_sample_applies_an_exported_adapter(workplace, tiny_model):
    main(["train", "tiny.yaml"])
    main(["export", "runs/t", "--out", "lora"])
    call = [f"{k}={v}" for k, v in CALL.items()]
    main(["sample", str(tiny_model), "--prompt", "a red circle", "--out", "with", "--adapter", "lora", *call])
    main(["sample", str(tiny_model), "--prompt", "a red circle", "--out", "without", *call])
    trained = Path("with/0000.png").read_bytes()
    assert trained == Path("runs/t/samples/step-000002/0000.png").read_bytes()
    assert Path("without/0000.png").read_bytes() == Path("runs/t/samples/step-000000/0000.png").read_bytes()
    assert trained != Path("without/0000.png").read_bytes()


def test_rewards_are_listed_and_described(capsys):
    assert main(["rewards", "--format", "json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["shapes"]["range"] == "0 to 1"
    assert set(rows["jpeg_size"]) == {"name", "inputs", "range", "weights", "licence"}
    assert main(["rewards", "shapes"]) == 0
    assert "Share of each caption" in capsys.readouterr().out


def test_the_python_entry_points(workplace, tiny_model):
    import flowgrpo

    run = flowgrpo.train("tiny.yaml", {"train.iterations": 1})
    assert run.folder == Path("runs/t")
    assert [line["phase"] for line in run.metrics] == ["eval", "train", "eval"]
    policy = flowgrpo.load_policy(str(tiny_model), dtype="bfloat16", call=CALL)
    samples = policy.sample(["a red circle"], seed=0)
    assert samples.shape == (1, 3, 16, 16)
    trained = run.policy.sample(["a red circle"], seed=0)
    last = json.loads(Path("runs/t/samples/manifest.jsonl").read_text().splitlines()[-2])
    assert trained[0, 0].mean().item() == pytest.approx(last["rewards"]["redness"], abs=1e-6)
