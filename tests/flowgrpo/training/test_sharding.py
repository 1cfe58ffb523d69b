"""A frozen base in shards trains what a whole one trains, to the bit."""

import pytest
import torch
from in_shards import held, of_machines
from pair import pair
from runs import background, metrics, weights

from flowgrpo import config
from flowgrpo.errors import InputError
from flowgrpo.training import sharding

TEXTS = """
kind: mdlm
model: {path: digits, lora: {rank: 2, alpha: 4, targets: all-linear}}
rewards: [{use: solved}]
train: {iterations: 2, updates: 1, groups: 2, group_size: 3, micro_batch: 3, learning_rate: 0.01}
eval: {every: 2, prompts: 1, save: 0}
run: {checkpoint: {every: 2, keep: 1}}
"""
CASES = {
    "pruned trees, a divergence, checkpointing": [
        "tiny.yaml",
        "algorithm.preset=branch_grpo",
        "algorithm.tree.prune={rule: extremes}",
        "algorithm.objective.kl.beta=0.1",
        "model.gradient_checkpointing=true",
        "train.updates=1",
    ],
    "guided calls on an int8 base": [
        "tiny.yaml",
        "algorithm.preset=flow_grpo_fast",
        "model.call.guidance_scale=2.0",
        "model.quantise=int8",
        "train.updates=1",
    ],
    "texts, in one pass and in two": [
        "texts.yaml",
        "algorithm.preset=cj_grpo",
        "algorithm.objective.kl.level=sequence",
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_a_base_in_shards_trains_as_a_whole_one(case, workplace):
    (workplace / "texts.yaml").write_text(TEXTS)
    lines = {}
    for name in ("none", "fsdp2"):
        process = background("train", *CASES[case], f"run.name={name}", f"run.sharding={name}", "run.processes=2")
        _, said = process.communicate(timeout=300)
        if torch.__version__.startswith("2.9.") and "cannot cut a base of whole numbers" in said:
            return  # the lowest version
        assert process.returncode == 0, said
        lines[name] = [
            {key: value for key, value in line.items() if not key.startswith(("time/", "memory/"))}
            for line in metrics(workplace / "runs" / name)
        ]
    assert lines["none"] == lines["fsdp2"]
    whole, sharded = (weights(workplace / "runs" / name, 2) for name in lines)
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[key], sharded[key]) for key in whole)


def test_each_process_holds_its_part_of_the_base_and_whole_adapters(tmp_path):
    found = pair(held, tmp_path)
    assert sum(each["here"] for each in found) == found[0]["all"]
    for each in found:
        assert each["here"] == pytest.approx(each["all"] / 2, rel=0.05)
        assert each["adapters whole"]
        assert each["blocks"] == ["", "transformer_blocks.0", "transformer_blocks.1"]


def test_every_machine_holds_all_of_it(tmp_path):
    assert pair(of_machines, tmp_path) == [(("replicate", "shard"), (2, 1))] * 2


def chosen(**model):
    return config.validated(
        {"model": {"path": "shapes", **model}, "rewards": [{"use": "shapes"}], "run": {"sharding": "fsdp2"}}
    )


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            {"lora": None},
            "run.sharding: fsdp2 cuts the frozen base of a LoRA, and without model.lora nothing is frozen",
        ),
        (
            {"lora": {}, "quantise": "torchao_int8"},
            "run.sharding: the layers of model.quantise=torchao_int8 cannot be cut, take int8 or fp8 or nf4",
        ),
        ({"lora": {}, "offload_activations": True}, "run.sharding: model.offload_activations would take each gathered"),
    ],
)
def test_what_cannot_be_cut_is_refused(model, said):
    with pytest.raises(InputError, match=said):
        sharding.check(chosen(**model))


def test_a_network_outside_of_blocks_is_refused():
    network = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ModuleList([torch.nn.Linear(2, 2)]))
    with pytest.raises(InputError, match="run.sharding: most of Sequential lies in none of its repeated blocks"):
        sharding.blocks(network)


def test_what_can_be_cut_is_taken():
    sharding.check(chosen(lora={}, quantise="nf4"))
