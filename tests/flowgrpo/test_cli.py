"""The command line: wrong input of any command is one sentence and status 2."""

import json
import os

import pytest
import yaml

from flowgrpo import config
from flowgrpo.cli import main

COMMANDS = [
    ["sample", "shapes", "--prompt", "a"],
    ["sample", "digits", "--prompt", "1"],
    ["gallery", "runs/t"],
    ["export", "runs/t"],
    ["mdlm", "tracelock", "digits", "--prompts", "prompts.txt"],
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_cannot_write_say_so_before_they_begin(workplace, monkeypatch, unloaded, capsys, command):
    for name in ("outputs.sampling.load_text_policy", "controller.train_controller.load_predictor"):
        monkeypatch.setattr(f"flowgrpo.mdlm.{name}", lambda *a, **k: pytest.fail("the model was loaded"))
    run = workplace / "runs" / "t"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(config.load("tiny.yaml").model_dump()))
    (workplace / "file").touch()
    os.mkfifo(workplace / "fifo")
    os.symlink("circle", workplace / "circle")
    before = sorted(workplace.rglob("*"))
    for out in ("file/out/page", "a" * 300, "fifo", "circle/page", "/dev/null"):
        assert main([*command, "--out", out]) == 2
        told = capsys.readouterr().err
        assert out in told
        assert told.count("\n") == 1
    assert sorted(workplace.rglob("*")) == before


@pytest.mark.parametrize(
    "arguments",
    [["train"], ["plan"], ["doctor"], ["gallery"], ["sample", "--prompt", "a", "--out", "o"], ["export", "--out", "o"]],
)
def test_a_name_that_no_file_can_have_is_one_sentence(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    command, *options = arguments
    assert main([command, "a" * 300, *options]) == 2
    file = "a" * 300 + "/config.yaml" * (command == "export")
    assert capsys.readouterr().err == f"flowgrpo: {file} cannot be used (File name too long)\n"


def test_other_errors_of_the_file_system_keep_their_trace(monkeypatch):
    def missing():
        raise FileNotFoundError(2, "No such file or directory", "models.json")

    monkeypatch.setattr("flowgrpo.cli.app", lambda **k: missing())
    with pytest.raises(FileNotFoundError):
        main(["models"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "tiny.yaml", "train.iteration=3"], "train.iteration: unknown key, did you mean 'iterations'?"),
        (["train", "tiny.yaml", "train.iterations=ten"], "train.iterations: 'ten' is wrong"),
        (["train", "nothing.yaml"], "nothing.yaml: no such config file"),
        (["train", "quite_another_thing.yaml"], "no such config file; flowgrpo init has some to begin with"),
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
            "eval_rewards: 'f' is only for n = 1, no held-out prompt has that column; they have nothing but their texts",
        ),
        (
            ["train", "tiny.yaml", "rewards=[{use: jpeg_size}, {use: jpeg_size}]"],
            "two rewards are named 'jpeg_size': leave",
        ),
        (
            ["train", "tiny.yaml", "rewards=[jpeg_size]", "eval_rewards=[jpeg_size]"],
            "two rewards are named 'jpeg_size', one in rewards and one in eval_rewards: leave one out",
        ),
        (
            ["train", "tiny.yaml", "eval_rewards=[{use: preference, options: {scores: jpeg_size}}]"],
            "eval_rewards: the reward 'preference' compares the samples of a group, and a held-out prompt has one sample",
        ),
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
        (["train", "tiny.yaml", "model.call.height=17"], "model.call.height: 17 is not a multiple of 4; take 16 or 20"),
        (["train", "tiny.yaml", "model.call.height=x"], "model.call: StableDiffusion3Pipeline refuses {"),
        (["train", "tiny.yaml", "model.call.height=true"], "model.call.height: True is no number, leave it out"),
        (["plan", "tiny.yaml", "model.call.guidance_scale=x"], "model.call.guidance_scale: 'x' is no number, take 7.0"),
        (
            ["train", "tiny.yaml", "train.draft={pool: 2, call: {foo: 1}}"],
            "train.draft.call.foo: StableDiffusion3Pipeline has no such argument",
        ),
        (
            ["plan", "tiny.yaml", f"run.seed={2**32}"],
            "run.seed: 4294967296 is wrong, input should be less than or equal to",
        ),
        (
            ["plan", "tiny.yaml", "train.micro_batch=.inf"],
            "train.micro_batch: inf is neither a whole number from 1 to 1,048,576",
        ),
        (
            [
                "plan",
                "tiny.yaml",
                "model.gradient_checkpointing=true",
                "model.call.joint_attention_kwargs={scale: 0.5}",
            ],
            "model.call.joint_attention_kwargs.scale: with model.gradient_checkpointing the gradients would have",
        ),
        (
            ["plan", "tiny.yaml", "algorithm.tree={name: window, size: 1, steps: [5, 2]}"],
            "algorithm.tree.steps: [5, 2] are not steps among the 2 stochastic ones, take [0, 2] or less",
        ),
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
            "algorithm.tree.splits: [0, 3] are not different steps among the 2 stochastic ones, 0 to 1",
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
            "algorithm.tree.profile: [2, 2, 2, 2] are not the numbers of children of at most 2 stochastic steps",
        ),
        (
            ["train", "tiny.yaml", "algorithm.kernel.level=[0.7, 0.6]", "model.call.num_inference_steps=4"],
            "algorithm.kernel.level: 2 levels for 4 steps, take 4, or 3 if the last step is ODE",
        ),
        (
            ["train", "tiny.yaml", "algorithm.kernel.level=[0.9, 0.8, 0.7, 0.6, 0.5]"],
            "algorithm.kernel.level: 5 levels for 3 steps, take 3, or 2 if the last step is ODE",
        ),
        (
            ["train", "tiny.yaml", "run.trackers=[tensorbord]"],
            "there is no tracker 'tensorbord', did you mean 'tensorboard'?",
        ),
        (["train", "tiny.yaml", "run.trackers=[swanlab]"], "run.trackers: swanlab is not installed here, install it"),
        (
            ["train", "tiny.yaml", "run.trackers=[wandb]"],
            "is not installed here, pip install 'flowgrpo[wandb]' or remove",
        ),
        (["train", "tiny.yaml", "run.resume=true"], "run.resume: there is no run in runs/t"),
        (
            ["plan", "tiny.yaml", "algorithm.preset=grpo"],
            "algorithm.preset: 'grpo' is unknown, did you mean 'flow_grpo'?",
        ),
        (
            ["plan", "tiny.yaml", "algorithm=awm_fast"],
            "algorithm: 'awm_fast' is not a map such as {preset: flow_grpo}, did you mean algorithm.preset=awm_fast?",
        ),
        (["plan", "tiny.yaml", "algorithm=awm_fst"], "algorithm: 'awm_fst' is not a map such as {preset: flow_grpo}\n"),
        (["plan", "tiny.yaml", "algorithm.kernel=cpss"], "algorithm.kernel: 'cpss' is unknown, did you mean 'cps'?"),
        (["plan", "tiny.yaml", "model.path=./nowhere"], "model.path: there is no folder './nowhere'"),
        (["sample", "shapes", "--out", "o"], "give either --prompt TEXT"),
        (["sample", "shapes", "--out", "o", "--prompts", "no.txt"], "--prompts: there is no file no.txt"),
        (
            ["sample", "shapes", "--out", "o", "--prompt", "a", "--adapter", "x"],
            "--adapter: there is no file or folder 'x'",
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


MISFITS = [
    (["algorithm.credit=step_gain"], "algorithm.credit: step_gain needs a value of every state, take the tree twigs"),
    (
        ["algorithm.credit=siblings"],
        "algorithm.credit: siblings needs a tree that finishes its branches by ODE, such as brush",
    ),
    (["algorithm.credit=discounted_value"], "algorithm.credit: discounted_value needs a value of every state, take"),
    (
        ["algorithm.preset=branch_grpo", "algorithm.credit=terminal"],
        "algorithm.credit: terminal needs trajectories that share no edge, such as those of chain",
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
        ["algorithm.preset=branch_grpo", "algorithm.tree.splits=[0, 1]", "algorithm.tree.prune={rule: extremes}"],
        "algorithm.tree.prune: no stochastic step follows the split at 1, so nothing can be left out",
    ),
    (
        ["algorithm.preset=branch_grpo", "algorithm.credit.weights=path", "algorithm.kernel.log_prob=constant_free"],
        "algorithm.credit.weights: path needs algorithm.kernel.log_prob mean or sum, a density",
    ),
]


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("command", ["plan", "train"])
def test_axes_that_do_not_fit_each_other_are_refused_before_any_weights_load(workplace, capsys, command):
    for options, said in MISFITS:
        assert main([command, "tiny.yaml", *options]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith(f"flowgrpo: {said}")
        assert captured.err.count("\n") == 1
        assert captured.out == ""
    with pytest.raises(pytest.fail.Exception, match="the model was loaded"):  # what fits gets as far
        main(["train", "tiny.yaml"])
    assert not (workplace / "runs").exists()
