"""Memory that runs out ends a run in one sentence, which says the phase, the amounts and the switch that helps most."""

import shlex
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from diffusers import AutoencoderKL, DiffusionPipeline, SD3Transformer2DModel
from runs import metrics
from transformers import CLIPTextModelWithProjection

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.commands import exit_status
from flowgrpo.flow.trainer import FlowWing
from flowgrpo.training.loop import Loop
from flowgrpo.training.planning.memory_advice import SWITCHES, advice
from flowgrpo.training.run.out_of_memory_error import OutOfMemory, last_resort
from flowgrpo.training.run.stop_reasons import RanOutOfMemory

CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB of which 312.00 MiB is free. "
    "Including non-PyTorch memory, this process has 23.33 GiB memory in use."
)
AMOUNTS = "2.00 GiB asked for, 312.00 MiB of the GPU's 23.65 GiB free"


def run_out(monkeypatch, kind, method="forward", when=lambda: True):
    """A method of a class that runs out of a GPU's memory."""
    real = getattr(kind, method)

    def short(self, *arguments, **options):
        if when():
            raise torch.OutOfMemoryError(CUDA)
        return real(self, *arguments, **options)

    monkeypatch.setattr(kind, method, short)


def begun(monkeypatch, kind, method):
    """Whether a method has been called."""
    real, calls = getattr(kind, method), []
    monkeypatch.setattr(kind, method, lambda self, *arguments: (calls.append(1), real(self, *arguments))[1])
    return lambda: bool(calls)


def run_out_while_loading(monkeypatch):
    def short(*arguments, **options):
        raise torch.OutOfMemoryError(CUDA)

    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", short)


def fifth():
    """Whether it is called for the fifth time or later: two encoders have read two prompts in the trial."""
    calls = count(1)
    return lambda: next(calls) > 4


NETWORK, ENCODER = SD3Transformer2DModel, CLIPTextModelWithProjection


@pytest.mark.parametrize(
    ("phase", "short", "switch"),
    [
        ("loading", run_out_while_loading, "model.dtype=bfloat16"),
        ("trial", lambda patch: run_out(patch, NETWORK), "model.vae_tiling=true"),
        ("encoding", lambda patch: run_out(patch, ENCODER, when=fifth()), "model.dtype=bfloat16"),
        ("evaluating", lambda p: run_out(p, NETWORK, when=begun(p, Loop, "evaluate")), "train.micro_batch=1"),
        ("rollout", lambda p: run_out(p, NETWORK, when=begun(p, FlowWing, "rollout")), "train.micro_batch=1"),
        (
            "decoding",
            lambda p: run_out(p, AutoencoderKL, "decode", begun(p, FlowWing, "rollout")),
            "model.vae_tiling=true",
        ),
        ("update", lambda p: run_out(p, NETWORK, when=torch.is_grad_enabled), "model.gradient_checkpointing=true"),
    ],
)
def test_each_phase_of_a_run_ends_in_one_sentence(workplace, monkeypatch, capsys, phase, short, switch):
    short(monkeypatch)
    asked = ["train", "tiny.yaml", "train.micro_batch=2"]
    if phase == "encoding":
        asked.append("model.text_encoders=free")  # else texts are encoded when they are sampled
    assert main(asked) == 1
    said = capsys.readouterr().err
    kept = [word for word in asked if word.partition("=")[0] != switch.partition("=")[0]]
    rest = f"begin again with: flowgrpo {' '.join(kept)} {switch}"
    if phase not in ("loading", "trial", "encoding"):
        rest = f"there is no checkpoint, {rest} run.resume=true"
    sentence = f"stopped, out of memory in the {phase} phase ({AMOUNTS}); what helps most is {switch}; {rest}"
    assert said.splitlines()[-1] == sentence
    assert "Traceback" not in said


SHORT = ["train.iterations=2", "train.groups=1", "train.updates=1", "eval.every=9", "eval.prompts=1", "eval.save=0"]
HUNGRY = """
from pathlib import Path
import torch
def redness(images, prompts):
    if Path("dead").exists() and any('"train"' in path.read_text() for path in Path("runs/t").glob("metrics.jsonl")):
        torch.empty(10**15)
    return images[:, 0].mean((1, 2))
"""


def test_a_run_out_of_memory_goes_on_from_its_checkpoint_by_the_command_it_says(workplace, capsys):
    """Here the CPU's own allocator refuses, in a reward."""
    (workplace / "mine.py").write_text(HUNGRY)
    (workplace / "dead").touch()
    options = [*SHORT, "model.text_encoders=keep"]
    assert main(["train", "tiny.yaml", *options]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    sentence, _, command = said.partition(" with: ")
    assert sentence.startswith("stopped, out of memory in the rewards phase, by the reward 'redness' (3725290.30 GiB ")
    helps = "what helps most is model.text_encoders=free; a checkpoint of step 1 is there, go on"
    assert sentence.endswith(f"free); {helps}")
    expected = f"flowgrpo train tiny.yaml {' '.join(SHORT)} model.text_encoders=free run.resume=true"
    assert command == expected
    (workplace / "dead").unlink()
    assert main(shlex.split(command)[1:]) == 0
    assert [line["step"] for line in metrics(workplace / "runs" / "t")] == [1, 2]


def test_a_resumed_run_may_have_smaller_batches(workplace, monkeypatch, capsys):
    options = [*SHORT, "model.gradient_checkpointing=true", "train.replay=always"]
    folder = workplace / "runs" / "t"
    run_out(monkeypatch, SD3Transformer2DModel, when=lambda: torch.is_grad_enabled() and metrics(folder))
    assert main(["train", "tiny.yaml", *options]) == 1
    command = capsys.readouterr().err.splitlines()[-1].partition(" with: ")[2]
    assert command.endswith("train.micro_batch=2 run.resume=true")
    monkeypatch.undo()
    monkeypatch.chdir(workplace)
    assert main(shlex.split(command)[1:]) == 0
    assert [line["step"] for line in metrics(workplace / "runs" / "t")] == [1, 2]


def run_of(train=None, **model):
    train = train or {"micro_batch": 4, "replay": "always"}
    return config.validate({"model": {"path": "shapes", **model}, "train": train})


@pytest.mark.parametrize("phase", SWITCHES)
@pytest.mark.parametrize("on_gpu", [True, False])
def test_advice_taken_is_never_given_again_and_comes_to_an_end(phase, on_gpu):
    settings, taken = run_of({"micro_batch": 4}, text_encoders="keep"), []
    while (switch := advice(phase, settings, on_gpu)) is not None:
        taken.append(switch)
        settings = config.apply_override(settings.model_dump(), [switch])
        assert len(taken) < 20
    assert len(taken) == len(set(taken)) > 0
    assert last_resort(phase)


@pytest.mark.parametrize(
    ("written", "phase", "on_gpu", "switch"),
    [
        ({}, "update", True, "model.gradient_checkpointing=true"),
        ({"gradient_checkpointing": True}, "update", True, "train.micro_batch=2"),
        ({"text_encoders": "keep"}, "rewards", True, "model.text_encoders=offload"),
        ({"text_encoders": "keep"}, "rewards", False, "model.text_encoders=free"),
        ({"text_encoders": "offload"}, "rewards", True, None),
        ({"dtype": "bfloat16"}, "loading", True, "model.quantise=int8"),
        ({"dtype": "bfloat16", "lora": None}, "loading", True, "model.lora={rank: 16}"),
        ({"dtype": "bfloat16", "quantise": "nf4"}, "loading", True, None),
        ({"dtype": "bfloat16"}, "encoding", True, None),
        ({}, "checking", True, "model.gradient_checkpointing=true"),
        ({}, "decoding", True, "model.vae_tiling=true"),
        ({}, "nothing", True, None),
    ],
)
def test_the_switch_that_helps_most_is_the_first_that_is_not_set(written, phase, on_gpu, switch):
    assert advice(phase, run_of(**written), on_gpu) == switch


@pytest.mark.parametrize("phase", ["rollout", "decoding", "rewards", "update"])
def test_graphs_that_must_be_kept_are_given_up_first(phase):
    assert advice(phase, run_of({"replay": "never"}), on_gpu=True) == "train.replay=auto"
    assert advice(phase, run_of({"replay": "auto"}), on_gpu=True) == "train.replay=always"
    assert not str(advice(phase, run_of({"replay": "always"}), on_gpu=True)).startswith("train.replay")


DRAFTING = {"micro_batch": 1, "draft": {"precision": "int8"}, "replay": "always"}
FREED = {"text_encoders": "free", "gradient_checkpointing": True}


@pytest.mark.parametrize("phase", ["rollout", "update"])
def test_a_copy_of_the_base_goes_before_the_base_is_quantised(phase):
    settings = run_of(DRAFTING, **FREED)
    assert advice(phase, settings, on_gpu=True) == "train.draft.precision=null"
    settings = config.apply_override(settings.model_dump(), ["train.draft.precision=null"])
    assert advice(phase, settings, on_gpu=True) == "model.quantise=int8"


def test_a_copy_of_weights_that_learn_is_there_while_drafts_are_sampled():
    settings = run_of(DRAFTING, lora=None, **FREED)
    assert advice("rollout", settings, on_gpu=True) == "train.draft.precision=null"
    assert advice("update", settings, on_gpu=True) == "model.lora={rank: 16}"


@pytest.mark.parametrize("quantise", [None, "nf4"])
def test_several_processes_are_told_to_share_the_base(monkeypatch, quantise):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert advice("loading", run_of(dtype="bfloat16", quantise=quantise), on_gpu=True) == "run.sharding=fsdp2"


def test_a_gpu_that_is_too_small_is_told_of_the_plan(workplace, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=25_400_000_000))
    stopped = RanOutOfMemory(f"stopped, {OutOfMemory('evaluating', torch.OutOfMemoryError(CUDA))}", "begin again", [])
    told = exit_status.report_stops(Path("tiny.yaml"), ["train.iterations=3"])
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        told.__enter__()
        with pytest.raises(typer.Exit):
            told.__exit__(type(stopped), stopped, None)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    command = said[1].partition("on this GPU: ")[2]
    assert command == "flowgrpo plan tiny.yaml train.iterations=3 --gpu-memory 23"
    assert main(shlex.split(command)[1:]) == 0
    assert "fits 23.0 GiB" in capsys.readouterr().out


def test_a_language_model_is_told_of_no_switch_that_it_lacks():
    model = {"path": "digits", "gradient_checkpointing": True, "quantise": "int8", "dtype": "bfloat16"}
    written = {"kind": "mdlm", "model": model, "rewards": ["exact"], "train": {"micro_batch": 1}}
    settings = config.validate(written)
    assert [advice(phase, settings, on_gpu=True) for phase in SWITCHES] == [None] * len(SWITCHES)


CPU = "[...] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes."


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError(CUDA), AMOUNTS),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "on the GPU"),
        (RuntimeError(CPU), "8.00 GiB asked for, "),
        (MemoryError("Unable to allocate 7.11 PiB for an array with shape (3,)"), "7.11 PiB asked for, "),
        (MemoryError(), ""),
    ],
)
def test_the_amounts_are_those_of_the_error_or_of_the_machine(error, said):
    told = str(OutOfMemory("update", error))
    assert told.startswith(f"out of memory in the update phase ({said}")
    if "GPU" not in said:
        assert " of this machine's " in told


@pytest.mark.parametrize(
    ("command", "when", "remedy"),
    [
        ("sample", lambda: True, "--batch-size 8"),
        ("doctor", lambda: True, "model.vae_tiling=true"),
        ("doctor", torch.is_grad_enabled, "model.gradient_checkpointing=true"),
    ],
)
def test_other_commands_end_in_one_sentence_too(workplace, tiny_model, monkeypatch, capsys, *, command, when, remedy):
    run_out(monkeypatch, SD3Transformer2DModel, when=when)
    call = ["num_inference_steps=2", "height=16", "width=16", "max_sequence_length=1"]
    arguments = {"sample": [str(tiny_model), *call, "--prompt", "a", "--out", "out"], "doctor": ["tiny.yaml"]}
    assert main([command, *arguments[command]]) == 1
    said = capsys.readouterr().err
    assert "out of memory in the " in said.splitlines()[-1]
    assert said.splitlines()[-1].endswith(f"({AMOUNTS}); what helps most is {remedy}")
    assert "Traceback" not in said
