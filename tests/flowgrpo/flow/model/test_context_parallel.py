"""Two processes that share each call of a network compute what one does, and train to the same weights."""

import shutil
from functools import partial

import pytest
import torch
from in_context import sharing, velocity_and_gradient
from in_turn import Turn, each_in_turn, trained_in_turn
from runs import metrics, weights
from zoo import SPECIMENS

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.errors import InputError
from flowgrpo.flow.model import context_parallel

CALLS = {
    "FluxPipeline": {},
    "Flux2Pipeline": {},
    "QwenImagePipeline": {"true_cfg_scale": 1.0},
    "WanPipeline": {},
    "WanPipeline (5B)": {},
    "ChronoEditPipeline": {},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What two processes that share calls find of each pipeline, of one with checkpointing, and last, of an uneven
    sequence, their error."""
    functions = {name: partial(velocity_and_gradient, name=name, call=call) for name, call in CALLS.items()}
    functions["checkpointed"] = partial(velocity_and_gradient, name="WanPipeline", call={}, checkpointing=True)
    uneven = {"max_sequence_length": 15}
    functions["uneven"] = partial(velocity_and_gradient, name="FluxPipeline", call=uneven)
    return each_in_turn(functions, tmp_path_factory.mktemp("found"))


@pytest.mark.parametrize("name", CALLS)
def test_a_shared_call_has_the_velocity_and_the_gradient_of_a_whole_one(name, found):
    whole, _, gradients = velocity_and_gradient(0, name, CALLS[name], degree=1)
    for velocity, before, summed in found[name]:
        for mine, own, replayed in zip(whole, velocity, before, strict=True):
            assert torch.equal(own, replayed)
            assert (own - mine).abs().max() <= 1e-6 * max(1.0, float(mine.abs().max()))
        norm = sum(float(g.square().sum()) for g in gradients.values()) ** 0.5
        apart = sum(float((summed[key] - g).square().sum()) for key, g in gradients.items()) ** 0.5
        assert apart <= 2e-6 * norm


def test_checkpointing_changes_no_number_of_a_shared_call(found):
    velocity, _, gradients = found["WanPipeline"][0]
    for other, _, others in found["checkpointed"]:
        assert all(torch.equal(a, b) for a, b in zip(velocity, other, strict=True))
        assert all(torch.equal(gradients[key], others[key]) for key in gradients)


def test_a_sequence_that_does_not_divide_is_refused(found):
    for said in found["uneven"]:
        assert said == (
            "InputError: run.context_parallel: 2 processes cannot share a sequence of 15 in FluxTransformer2DModel evenly, "
            "take 1, or another height, width, num_frames or max_sequence_length in model.call"
        )


CONFIG = """
model: {{path: model, lora: {{rank: 2, alpha: 4}}, call: {call}}}
prompts: {{train: prompts.txt, eval: prompts.txt}}
rewards: [{{use: './mine.py:redness'}}]
algorithm: {{preset: flow_grpo_fast, tree: {{size: 1}}}}
train: {{iterations: 2, updates: 1, groups: 2, group_size: 2, micro_batch: 4, learning_rate: 0.01, replay: always}}
eval: {{every: 2, prompts: 3, save: 0}}
run: {{name: alone, checkpoint: {{every: 1, keep: 3}}}}
"""
REWARD = """
import os
def redness(samples, prompts):
    with open(f"scored-{os.getpid()}", "a") as file:
        file.write("x" * len(samples))
    return samples[..., 0, :, :].flatten(1).mean(1)
redness.to = lambda device: open(f"moved-{os.getpid()}", "w").close()
"""
TRIED = 4  # samples that every process scores before it begins


def furnish(folder, name, **call):
    """A config of a very small run on a pipeline of the zoo, and what it names."""
    specimen = SPECIMENS[name]
    specimen.build().save_pretrained(folder / "model")
    (folder / "prompts.txt").write_text("a red fox in the snow\na cat\na green circle\na dog\n")
    (folder / "mine.py").write_text(REWARD)
    (folder / "context.yaml").write_text(CONFIG.format(call={**specimen.call, "num_inference_steps": 2, **call}))


def alone(folder, name, *overrides, **call):
    """Furnish a folder, and make a run there in one process; returns how many samples were scored."""
    furnish(folder, name, **call)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "context.yaml", *overrides]) == 0
    (count,) = scored(folder)
    return count


def scored(folder):
    """How many samples each process has scored in a folder since this was asked before."""
    files = list(folder.glob("scored-*"))
    counts = sorted(len(file.read_text()) for file in files)
    for file in files:
        file.unlink()
    return counts


def together(folder, name, *overrides, **options):
    """A run of which two processes share each call."""
    return Turn(str(folder), "context.yaml", name, [*overrides, "run.context_parallel=2"], **options)


def counted(folder):
    """The lines of a run but for what takes time, or is a sum in some order."""
    exact = ("cost/", "step", "phase", "policy/updates", "reward/lost", "reward/count", "groups/")
    lines = [*metrics(folder), *metrics(folder, "eval")]
    return [{key: value for key, value in line.items() if key.startswith(exact)} for line in lines]


def timeless(folder):
    """The lines of a run but for times and memory."""
    lines = [*metrics(folder), *metrics(folder, "eval")]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in lines]


def drift(folder):
    """The largest |log ratio| of a run before its optimizer steps."""
    return max(line["policy/max_abs_log_ratio"] for line in metrics(folder))


def gap(folder, other):
    """How far the weights of a run are from those of another, as a part of the way of its second step."""
    before, whole, there = weights(folder, 1), weights(folder, 2), weights(other, 2)
    assert whole.keys() == there.keys()
    apart = sum(float((whole[key] - there[key]).square().sum()) for key in whole) ** 0.5
    return apart / sum(float((whole[key] - before[key]).square().sum()) for key in whole) ** 0.5


PRUNED = ["algorithm={preset: branch_grpo, tree: {prune: {rule: extremes}}}", "train.group_size=4"]
ALL = ["model.lora=null", "train.optimizer.eps=1", "train.learning_rate=1"]  # steps along the gradient, however small
REFERENCE = ["algorithm.objective.kl.beta=0.1"]
CHECKPOINTED = ["model.gradient_checkpointing=true"]
BOTH = ["algorithm.tree.size=2"]  # steps that are trained, of which each expert has one
CASES = {
    "all weights of two guided experts, checkpointed, held to a reference": (
        "WanPipeline (2.2)",
        {"num_inference_steps": 3},
        REFERENCE + CHECKPOINTED + BOTH + ALL,
    ),
    "guided calls with texts that are padded, held to a reference": (
        "QwenImagePipeline",
        {"negative_prompt": "blurry"},
        REFERENCE,
    ),
    "pruned trees, which gather their rows anew": ("FluxPipeline", {"num_inference_steps": 4}, PRUNED),
}
SHARDED = "run.sharding=fsdp2"


@pytest.fixture(scope="module")
def of_one(tmp_path_factory):
    """A folder with a run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    alone(folder, "FluxPipeline")
    return folder


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if ALL[0] in CASES[case][2] else pytest.mark.zoo) for case in CASES]
)
def test_two_processes_that_share_calls_and_weights_train_as_one(case, tmp_path, tmp_path_factory):
    name, call, overrides = CASES[case]
    count = alone(tmp_path, name, *overrides, **call)
    run, store = together(tmp_path, "both", SHARDED, *overrides), tmp_path_factory.mktemp("two")
    assert trained_in_turn([[run]], store, begin=sharing) == [{"both": [None, None]}]
    assert scored(tmp_path) == [TRIED, count]
    one, two = tmp_path / "runs" / "alone", tmp_path / "runs" / "both"
    assert counted(one) == counted(two)
    assert gap(one, two) < 1e-3
    assert drift(two) <= (1e-6 if overrides == PRUNED else 0)


def test_shards_change_no_number_of_shared_calls_nor_does_a_resume(of_one, tmp_path, tmp_path_factory):
    shutil.copytree(of_one, tmp_path, dirs_exist_ok=True)
    turns = [together(tmp_path, "whole"), together(tmp_path, "later", SHARDED, source="whole")]
    ends = trained_in_turn([turns], tmp_path_factory.mktemp("resumed"), begin=sharing)
    assert ends == [{name: [None, None] for name in ("whole", "later")}]
    one, whole, later = (tmp_path / "runs" / name for name in ("alone", "whole", "later"))
    for other in (whole, later):
        assert counted(one) == counted(other)
        assert drift(other) == 0
        assert gap(one, other) < 1e-4
    assert timeless(whole) == timeless(later)
    for step in (1, 2):
        first, second = weights(whole, step), weights(later, step)
        assert all(torch.equal(first[key], second[key]) for key in first | second)


@pytest.mark.zoo
def test_shares_of_the_data_are_dealt_to_pairs_of_processes(of_one, tmp_path, tmp_path_factory):
    shutil.copytree(of_one, tmp_path, dirs_exist_ok=True)
    run, store = together(tmp_path, "four", SHARDED), tmp_path_factory.mktemp("four")
    assert trained_in_turn([[run]], store, begin=sharing, processes=4) == [{"four": [None] * 4}]
    each, evaluations = 2 * 2, 2  # of a group in two iterations; the first pair has two of three held-out prompts
    assert scored(tmp_path) == [TRIED, TRIED, TRIED + each + evaluations, TRIED + each + 2 * evaluations]
    assert len(list(tmp_path.glob("moved-*"))) == 1 + 2  # and that of the run in one process
    one, four = tmp_path / "runs" / "alone", tmp_path / "runs" / "four"
    assert counted(one) == counted(four)
    assert drift(four) == 0
    assert gap(one, four) < 1e-4


def chosen(path, processes=4, degree=4, **model):
    run = {"processes": processes, "context_parallel": degree}
    model = {"path": str(path), **model}
    return config.validate({"model": model, "rewards": [{"use": "shapes"}], "train": {"groups": 16}, "run": run})


@pytest.mark.parametrize(
    ("name", "model", "said"),
    [
        (
            "StableDiffusion3Pipeline",
            {},
            "diffusers has no plan by which calls of SD3Transformer2DModel are shared; set it",
        ),
        (
            "LTXPipeline",
            {},
            "by diffusers' plan for LTXVideoTransformer3DModel its gradient was not seen to be whole; set",
        ),
        ("FluxControlNetPipeline", {}, "the controlnet of .* computes on whole sequences; set it to 1"),
        ("FluxPipeline", {}, "4 processes cannot share the 2 attention heads of transformer evenly, take 2"),
        ("FluxPipeline", {"compile": True}, "it was never tested with model.compile; set that to false"),
        (
            "FluxPipeline",
            {"attention": "xformers"},
            "calls with the attention xformers cannot be shared, take _flash_3",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(name, model, said, tmp_path):
    SPECIMENS[name].build().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=f"run.context_parallel: {said}"):
        context_parallel.check(chosen(tmp_path, **model))


def test_what_can_be_shared_is_taken(tmp_path):
    SPECIMENS["WanPipeline (2.2)"].build().save_pretrained(tmp_path)
    context_parallel.check(chosen(tmp_path, degree=2))
    context_parallel.check(chosen("shapes", degree=1))


def test_a_machine_without_accelerators_is_refused(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    with pytest.raises(
        InputError, match="run.context_parallel: diffusers shares calls among accelerators, and there is none"
    ):
        context_parallel.check_device(chosen("shapes"))
    context_parallel.check_device(chosen("shapes", degree=1))
