"""`flowgrpo plan CONFIG --gpu-memory GIB` on flow models."""

import json
from dataclasses import replace

import pytest
import torch

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.flow.pipeline.loading import meta_pipeline
from flowgrpo.flow.planning.memory_budget import FlowBudget
from flowgrpo.flow.planning.memory_trace import Sampling, Trial
from flowgrpo.flow.updates.rollout_graphs import Kept
from flowgrpo.training.planning.allocation_counter import Peaks
from flowgrpo.training.planning.memory_budget import GIB
from flowgrpo.training.weights.optimizers import MESSAGE


def each_row(size):
    return Peaks(((0, round(size * GIB)),))


TRIAL = Trial(
    components={"transformer": 10 * GIB, "text_encoder": 9 * GIB, "vae": GIB},
    shapes={"transformer": {"blocks.0.up.weight": (1024, 1024), "head.weight": (1024, 1024)}},
    width=2,
    trained=GIB // 8,
    state=GIB // 1024,
    encode=GIB // 4,
    rollout=Sampling(
        step=each_row(1),
        operations=0,
        launches=0,
        calls=1,
        decode=each_row(3),
        decode_tiled=each_row(1),
        sample=GIB // 128,
        decode_operations=0,
    ),
    evaluate=None,
    update=each_row(8),
    update_checkpointed=each_row(2),
    graph=Kept(once=0, each=GIB // 16),
    graph_checkpointed=Kept(once=0, each=GIB // 256),
    dequantises=False,
)


def budget(measured=TRIAL, *, loads_later=True, **changes):
    written = {"model": {"path": "shapes"}, "train": {"micro_batch": 2}}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        written.setdefault(section, {})[name] = value
    return FlowBudget(
        config=config.validated(written),
        trial=measured,
        states=1024,
        graphs=64,
        graph_times=2,
        samples=8 * 16,
        group=16,
        loads_later=loads_later,
        measure=lambda other: measured,
    )


def phases(*given, **changes):
    return {phase.name: phase for phase in budget(*given, **changes).phases()}


def test_encoders_and_the_network_are_never_on_the_device_together():
    found = phases()
    assert found["encode"].parts["weights"] == 10 * GIB
    assert found["rollout"].parts["weights"] == 11 * GIB
    assert phases(model__text_encoders="keep")["update"].parts["weights"] == 20 * GIB


def test_what_is_loaded_whole_holds_the_network_while_prompts_are_encoded():
    assert phases(model__text_encoders="keep")["encode"].parts["weights"] == 20 * GIB
    assert phases(loads_later=False)["encode"].parts["weights"] == 20 * GIB
    assert phases(loads_later=False, model__lora=None)["encode"].parts["weights"] == 20 * GIB
    assert phases(loads_later=False)["rollout"].parts["weights"] == 11 * GIB


def test_samples_that_wait_for_their_rewards_are_counted():
    found, sample = phases(), GIB // 128
    assert found["decode"].parts["samples"] == 4 * 16 * sample  # groups of 16
    assert found["reward"].parts["samples"] == 5 * 16 * sample
    assert "samples" not in found["rollout"].parts
    few = {phase.name: phase for phase in replace(budget(), samples=10).phases()}  # of a group that others share
    assert few["decode"].parts["samples"] == 10 * sample


def test_an_optimizer_step_may_take_more_than_the_activations():
    small = replace(TRIAL, update=each_row(1 / 8))
    assert phases(small)["update"].parts["activations"] == 2 * GIB // 8
    assert phases(small, run__processes=2)["update"].parts["activations"] == 2 * MESSAGE == 4 * GIB // 8


def test_an_evaluation_under_another_call_is_a_phase():
    assert "evaluate" not in phases()
    guided = replace(TRIAL.rollout, step=each_row(2), decode=each_row(5), sample=GIB // 64)
    found = phases(replace(TRIAL, evaluate=guided), train__rollout_batch=3)["evaluate"]
    assert found.rows == 3
    assert found.parts["activations"] == 15 * GIB
    tiled = phases(replace(TRIAL, evaluate=guided), train__rollout_batch=3, model__vae_tiling=True)["evaluate"]
    assert tiled.parts["activations"] == 6 * GIB


def test_what_changes_the_learning_is_offered_where_it_applies():
    keys = {key for key, _ in budget(model__lora=None).resorts()}
    assert keys == {"train.optimizer.name", "train.ema", "model.dtype", "model.lora"}
    keys = {key for key, _ in budget(model__dtype="bfloat16", train__ema=None).resorts()}
    assert keys == {"train.optimizer.name"}
    other = budget(model__lora=None).switched("model.lora", {})
    assert other.config.model.lora.rank == 16
    assert budget().switched("train.optimizer.name", "adamw8bit").config.train.optimizer.name == "adamw8bit"


def test_four_bits_are_offered_where_rows_are_whole_blocks():
    narrow = replace(TRIAL, shapes={"transformer": {"blocks.0.up.weight": (1024, 1000)}})
    assert ("model.quantise", "nf4") in budget().switches()
    assert [value for key, value in budget(narrow).switches() if key == "model.quantise"] == ["int8"]
    flat = replace(TRIAL, shapes={"transformer": {"head.weight": (1024, 1024)}})
    assert not [value for key, value in budget(flat).switches() if key == "model.quantise"]


def test_each_part_is_counted():
    parts = phases(algorithm__objective={"kl": {"beta": 0}})["update"].parts
    assert parts["trained"] == GIB  # adapters and their average, of 4 bytes a number
    assert parts["optimizer"] == GIB
    assert parts["gradients"] == GIB // 2
    assert parts["states"] == GIB
    assert parts["activations"] == 2 * 8 * GIB
    assert phases(train__ema=None)["update"].parts["trained"] == GIB // 2


def test_a_moving_reference_and_full_fine_tuning_are_copies():
    kl = {"beta": 0.04, "reference": "moving"}
    assert phases(algorithm__objective={"kl": kl})["update"].parts["trained"] == 3 * GIB // 2
    parts = phases(model__lora=None, algorithm__objective={"kl": {"beta": 0.04}})["update"].parts
    assert parts["trained"] == 3 * GIB // 2
    assert parts["weights"] == GIB  # the decoder's: what is trained is no frozen weight


def test_snapshots_are_copies():
    banks = [{"bank": {"keep": keep}} for keep in (1, 7)]
    one, seven = (
        phases(algorithm__preset="seppo", algorithm__likelihood=likelihood)["update"].parts["trained"]
        for likelihood in banks
    )
    assert (one, seven) == (3 * GIB // 2, 9 * GIB // 2)  # what learns and its average, and the snapshots


def test_switches_spare_what_they_are_for():
    assert phases(model__vae="offload")["update"].parts["weights"] == 10 * GIB
    assert phases(model__vae="offload")["decode"].parts["weights"] == 11 * GIB
    assert phases(model__vae_tiling=True)["decode"].parts["activations"] == 2 * GIB
    assert phases(model__gradient_checkpointing=True)["update"].parts["activations"] == 4 * GIB
    quantised = phases(model__quantise="int8")["update"].parts
    assert (
        quantised["weights"] == 11 * GIB - 1024 * 1024 + 1024 * 2
    )  # a byte less for each weight of the block, its scales
    assert (
        quantised["activations"] == 16 * GIB + 2 * 2 * 1024 * 1024
    )  # the layer that is made anew: values, and weights
    measured = phases(replace(TRIAL, dequantises=True), model__quantise="int8")["update"].parts
    assert measured["activations"] == 16 * GIB


def test_only_switches_that_are_not_set_are_offered():
    assert ("model.text_encoders", "offload") not in budget().switches()
    assert ("model.text_encoders", "offload") in budget(model__text_encoders="keep").switches()
    assert not [key for key, _ in budget(model__lora=None).switches() if key == "model.quantise"]
    assert not [key for key, _ in budget(model__quantise="nf4").switches() if key == "model.quantise"]


def test_a_copy_that_drafts_are_sampled_by_is_counted_while_it_is_there():
    """In int8 a byte for each weight of the block, and the scale of each row in the type of the weights."""
    drafting = {"train__draft": {"precision": "int8"}}
    frozen, learning = (1024 * 1024 + 1024 * width for width in (2, 4))
    plain, found = phases(), phases(**drafting)
    for name in ("rollout", "decode", "reward", "update"):
        assert found[name].parts["weights"] - plain[name].parts["weights"] == frozen
    assert found["encode"].parts == plain["encode"].parts
    anew = found["rollout"].parts["activations"] - plain["rollout"].parts["activations"]
    assert anew == 2 * 2 * 1024 * 1024  # of the layer that is made anew: values, and weights
    plain, found = phases(model__lora=None), phases(model__lora=None, **drafting)
    for name, more in (("rollout", learning), ("decode", learning), ("update", 0)):  # gone when the draft is sampled
        assert found[name].parts["weights"] - plain[name].parts["weights"] == more


def test_what_a_copy_of_drafts_does_not_go_with_is_not_offered():
    drafting = budget(train__draft={"precision": "int8"}, run__processes=2)
    keys = {key for key, _ in drafting.switches()}
    assert "train.draft.precision" in keys
    assert not keys & {"model.quantise", "run.sharding"}
    without = {key for key, _ in drafting.switched("train.draft.precision", None).switches()}
    assert without - keys == {"model.quantise", "run.sharding"}
    assert "train.draft.precision" not in {key for key, _ in budget().switches()} | without


@pytest.mark.usefixtures("kept_trials")
def test_plan_says_whether_a_run_fits_and_what_to_set(workplace, capsys):
    assert main(["plan", "tiny.yaml", "--gpu-memory", "2", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["gpu"]
    assert found["fits"]
    assert [phase["phase"] for phase in found["phases"]] == ["encode", "rollout", "decode", "reward", "update"]
    assert found["phases"][4]["rows"] == 4
    assert found["rewards_not_counted"] == ["./mine.py:redness"]
    many = found["largest"]["train.micro_batch"] + 1
    assert main(["plan", "tiny.yaml", f"train.micro_batch={many}", "--gpu-memory", "2"]) == 0
    said = capsys.readouterr().out
    assert f"does not fit 2.0 GiB as it is; it does, with 2.0, by: train.micro_batch={many - 1}" in said
    assert "not counted: the weights of ./mine.py:redness" in said


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model.gradient_checkpointing=true", "Unchecked does not support it, set it to false"),
        ("model.vae_tiling=true", "Untiled has no tiling, leave it out"),
    ],
)
def test_a_switch_that_the_pipeline_has_not_is_refused_as_by_a_run(workplace, setting, said, monkeypatch, capsys):
    built = meta_pipeline.pipeline

    def lacking(folder, dtype):
        pipe = built(folder, dtype)
        pipe.transformer.__class__ = type(
            "Unchecked", (type(pipe.transformer),), {"_supports_gradient_checkpointing": False}
        )
        pipe.vae.__class__ = type("Untiled", (torch.nn.Module,), {})
        return pipe

    monkeypatch.setattr(meta_pipeline, "pipeline", lacking)
    assert main(["plan", "tiny.yaml", setting, "--gpu-memory", "2"]) == 2
    assert said in capsys.readouterr().err


def test_plan_without_a_hub_takes_the_configs_that_are_known_here(monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["plan", "flux1-24gb", "--format", "json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert "memory" not in planned
    assert planned["config"]["model"]["path"] == "black-forest-labs/FLUX.1-dev"
    assert main(["plan", "flux1-24gb", "model.path=owner/unknown"]) == 2
    assert "owner/unknown" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["0", "-3", "much"])
def test_a_size_that_is_none_is_refused(size, capsys):
    assert main(["plan", "flux1-24gb", "--gpu-memory", size]) == 2
    assert "--gpu-memory" in capsys.readouterr().err


def test_a_base_in_shards_lies_in_parts_and_is_gathered_block_by_block():
    whole, parts = phases(run__processes=4), phases(run__processes=4, run__sharding="fsdp2")
    assert whole["rollout"].parts["weights"] - parts["rollout"].parts["weights"] == 10 * GIB * 3 // 4
    megabytes = 2**20
    gathered = 2 * megabytes + round(2.4 * 2 * megabytes)  # the head, and a block and a half
    for name in ("rollout", "update"):
        assert parts[name].parts["activations"] - whole[name].parts["activations"] == gathered
    assert parts["encode"] == whole["encode"]


def test_processes_that_share_calls_have_a_part_of_what_comes_with_each_row():
    """A rule: nothing is measured anew."""
    measured = replace(TRIAL, update=Peaks(((GIB, 8 * GIB),)))
    one = {phase.name: phase for phase in budget(measured).phases()}
    four = {phase.name: phase for phase in budget(measured, run__processes=4, run__context_parallel=4).phases()}
    assert one["rollout"].parts["activations"] == 2 * GIB
    assert four["rollout"].parts["activations"] == 2 * GIB // 4
    assert four["update"].parts["activations"] == GIB + 2 * 8 * GIB // 4
    for name in ("encode", "decode", "reward"):
        assert four[name] == one[name]
    for phase in one.values():
        assert four[phase.name].fixed == phase.fixed


def test_what_learns_in_shards_lies_in_parts_with_its_gradients_and_moments():
    full = {"model__lora": None, "run__processes": 4, "train__ema": None}
    whole, parts = phases(**full), phases(**full, run__sharding="fsdp2")
    for part in ("trained", "optimizer", "gradients"):
        assert parts["update"].parts[part] == whole["update"].parts[part] // 4 > 0
    assert parts["update"].parts["weights"] == whole["update"].parts["weights"]
    gathered = 2 * (2 * 2**20 + round(2.4 * 2 * 2**20))  # in float32
    assert parts["rollout"].parts["activations"] - whole["rollout"].parts["activations"] == gathered


@pytest.mark.parametrize(
    ("changes", "offered"),
    [
        ({"run__processes": 4}, True),
        ({"run__processes": 1}, False),
        ({"run__processes": 4, "model__lora": None}, True),
        ({"run__processes": 4, "model__lora": None, "model__dtype": "float16"}, False),
        ({"run__processes": 4, "run__sharding": "hsdp"}, False),
        ({"run__processes": 4, "run__sharding": "fsdp2"}, False),
    ],
)
def test_shards_are_offered_where_processes_can_share_a_base(changes, offered):
    assert (("run.sharding", "fsdp2") in budget(**changes).switches()) == offered


def test_graphs_of_a_rollout_are_counted_where_it_keeps_them():
    replayed, kept = phases(), phases(train__replay="never")
    for name in ("rollout", "decode", "update"):
        assert kept[name].parts["states"] - replayed[name].parts["states"] == 64 * GIB // 16
    few = phases(train__replay="never", model__gradient_checkpointing=True)
    assert few["update"].parts["states"] - replayed["update"].parts["states"] == 64 * GIB // 256
    shared = phases(train__replay="never", run__processes=4)
    assert shared["update"].parts["states"] == replayed["update"].parts["states"] // 4 + 16 * GIB // 16


def test_a_graph_of_each_call_has_copies_of_the_weights():
    """64 rows at two times are, in calls of 2, 32 calls; of four processes with 16 rows each it is 8."""
    copies = replace(TRIAL, graph=Kept(once=GIB, each=GIB // 16))
    assert budget(copies, train__replay="never").graph_bytes == (32 + 4) * GIB
    assert budget(copies, train__replay="never", run__processes=4).graph_bytes == (8 + 1) * GIB


def test_auto_keeps_graphs_that_take_half_of_what_is_left():
    auto = budget()
    room = auto.peak() + 2 * 4 * GIB
    assert auto.kept_graphs(room) == {"rows": 64, "bytes": 4 * GIB, "kept": True}
    assert not auto.kept_graphs(room - 1)["kept"]
    assert budget(train__replay="never").kept_graphs(GIB)["kept"]
    assert not budget(train__replay="always").kept_graphs(2**50)["kept"]
