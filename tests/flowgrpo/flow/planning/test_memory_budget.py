"""`flowgrpo plan CONFIG --gpu-memory GIB` on flow models."""

import json
from dataclasses import replace

import pytest
import torch

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.commands.runs import plan as plan_command
from flowgrpo.flow.pipeline.loading import meta_pipeline
from flowgrpo.flow.planning.memory_budget import FlowBudget
from flowgrpo.flow.planning.memory_trace import Sampling, Trial
from flowgrpo.flow.updates.rollout_graphs import Kept
from flowgrpo.schema.sections import RewardUse
from flowgrpo.training.planning.allocation_counter import Peaks
from flowgrpo.training.planning.memory_budget import check_fit, lines
from flowgrpo.training.planning.memory_phases import GIB
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
    embeddings=GIB // 512,
    held_out_embeddings=GIB // 1024,
    rollout=Sampling(
        step=each_row(1),
        operations=0,
        launches=0,
        calls=1,
        widest=5000,
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
        config=config.validate(written),
        trial=measured,
        states=1024,
        graphs=(32, 32),
        samples=8 * 16,
        group=16,
        train_prompts=1000,
        held_out=256,
        loads_later=loads_later,
        measure=lambda other: measured,
    )


def phases(*given, **changes):
    return {phase.name: phase.parts for phase in budget(*given, **changes).phases()}


def keys_of(settings):
    return {key for key, _ in settings}


LAYER = 1024 * 1024  # weights of the block
INT8, COPY = LAYER + 1024 * 2, LAYER + 1024 * 4  # bytes: one for each weight, and scales in bfloat16 or float32
SAMPLE = GIB // 128
DRAFTS = {"train__draft": {"precision": "int8"}}


def kl(**chosen):
    return {"algorithm__objective": {"kl": chosen}}


def snapshots(keep):
    return {"algorithm__preset": "seppo", "algorithm__likelihood": {"bank": {"keep": keep}}}


@pytest.mark.parametrize(
    ("changes", "phase", "part", "size"),
    [
        # Encoders and the network are never on the device together, unless the network is loaded with them.
        ({}, "encode", "weights", 10 * GIB),
        ({}, "rollout", "weights", 11 * GIB),
        ({"model__text_encoders": "keep"}, "update", "weights", 20 * GIB),
        ({"model__text_encoders": "keep"}, "encode", "weights", 20 * GIB),
        ({"loads_later": False}, "encode", "weights", 20 * GIB),
        ({"loads_later": False, "model__lora": None}, "encode", "weights", 20 * GIB),
        ({"loads_later": False}, "rollout", "weights", 11 * GIB),
        # Samples of groups of 16 wait for their rewards, and two are decoded in a call.
        ({}, "decode", "samples", (4 * 16 + 2) * SAMPLE),
        ({}, "reward", "samples", (5 * 16 + 2) * SAMPLE),
        ({}, "rollout", "samples", None),
        # Adapters and their average, of 4 bytes a number; and what else an update takes.
        (kl(beta=0), "update", "trained", GIB),
        (kl(beta=0), "update", "optimizer", GIB),
        (kl(beta=0), "update", "gradients", GIB // 2),
        (kl(beta=0), "update", "states", GIB),
        (kl(beta=0), "update", "activations", 2 * 8 * GIB),
        ({"train__ema": None}, "update", "trained", GIB // 2),
        # A moving reference, full fine-tuning and snapshots are copies; what is trained is no frozen weight.
        (kl(beta=0.04, reference="moving"), "update", "trained", 3 * GIB // 2),
        ({"model__lora": None, **kl(beta=0.04)}, "update", "trained", 3 * GIB // 2),
        ({"model__lora": None, **kl(beta=0.04)}, "update", "weights", GIB),
        (snapshots(1), "update", "trained", 3 * GIB // 2),
        (snapshots(7), "update", "trained", 9 * GIB // 2),
        # Switches spare what they are for.
        ({"model__vae": "offload"}, "update", "weights", 10 * GIB),
        ({"model__vae": "offload"}, "decode", "weights", 11 * GIB),
        ({"model__vae_tiling": True}, "decode", "activations", 2 * GIB),
        ({"model__gradient_checkpointing": True}, "update", "activations", 4 * GIB),
        ({"model__quantise": "int8"}, "update", "weights", 11 * GIB - 2 * LAYER + INT8),
        ({"model__quantise": "int8"}, "update", "activations", 16 * GIB + 2 * 2 * LAYER),  # the layer that is made anew
    ],
)
def test_each_part_is_counted(changes, phase, part, size):
    assert phases(**changes)[phase].get(part) == size


def test_samples_of_fewer_than_a_group_are_those():
    few = {phase.name: phase.parts for phase in replace(budget(), samples=10).phases()}
    assert few["decode"]["samples"] == 10 * SAMPLE


def test_a_layer_that_was_measured_is_not_counted_again():
    measured = phases(replace(TRIAL, dequantises=True), model__quantise="int8")["update"]
    assert measured["activations"] == 16 * GIB


def test_an_optimizer_step_may_take_more_than_the_activations():
    small = replace(TRIAL, update=each_row(1 / 8))
    assert phases(small)["update"]["activations"] == 2 * GIB // 8
    assert phases(small, run__processes=2)["update"]["activations"] == 2 * MESSAGE == 4 * GIB // 8


def test_an_evaluation_under_another_call_is_a_phase():
    assert "evaluate" not in phases()
    guided = replace(TRIAL.rollout, step=each_row(2), decode=each_row(5), sample=GIB // 64)
    for tiling, rows in ((False, 15), (True, 6)):
        chosen = {"train__rollout_batch": 3, "model__vae_tiling": tiling}
        (found,) = budget(replace(TRIAL, evaluate=guided), **chosen).phases()[5:]
        assert (found.name, found.rows, found.parts["activations"]) == ("evaluate", 3, rows * GIB)


def test_what_changes_the_learning_is_offered_where_it_applies():
    every = {"train.optimizer.name", "train.ema", "model.dtype", "model.lora"}
    assert keys_of(budget(model__lora=None).resorts()) == every
    assert keys_of(budget(model__dtype="bfloat16", train__ema=None).resorts()) == {"train.optimizer.name"}
    assert budget(model__lora=None).with_setting("model.lora", {}).config.model.lora.rank == 16
    assert budget().with_setting("train.optimizer.name", "adamw8bit").config.train.optimizer.name == "adamw8bit"


@pytest.mark.parametrize(
    ("changes", "key", "values"),
    [
        ({}, "model.quantise", ["int8", "nf4"]),
        ({"shapes": {"blocks.0.up.weight": (1024, 1000)}}, "model.quantise", ["int8"]),  # rows are no whole blocks
        ({"shapes": {"head.weight": (1024, 1024)}}, "model.quantise", []),
        ({"model__lora": None}, "model.quantise", []),
        ({"model__quantise": "nf4"}, "model.quantise", []),
        ({}, "model.text_encoders", []),  # that is set
        ({"model__text_encoders": "keep"}, "model.text_encoders", ["offload"]),
        ({}, "train.draft.precision", []),
        ({"run__processes": 4}, "run.sharding", ["fsdp2"]),
        ({"run__processes": 1}, "run.sharding", []),
        ({"run__processes": 4, "model__lora": None}, "run.sharding", ["fsdp2"]),
        ({"run__processes": 4, "model__lora": None, "model__dtype": "float16"}, "run.sharding", []),
        ({"run__processes": 4, "run__sharding": "hsdp"}, "run.sharding", []),
        ({"run__processes": 4, "run__sharding": "fsdp2"}, "run.sharding", []),
    ],
)
def test_switches_are_offered_where_they_are_possible_and_not_set(changes, key, values):
    shapes = changes.get("shapes")
    measured = TRIAL if shapes is None else replace(TRIAL, shapes={"transformer": shapes})
    others = {name: value for name, value in changes.items() if name != "shapes"}
    assert [value for offered, value in budget(measured, **others).switches() if offered == key] == values


def test_rewards_have_a_part_of_their_own_in_every_phase():
    plain, scored = budget(), budget()
    scored.config.rewards.append(RewardUse(use="pickscore", options={"dtype": "bfloat16"}))
    for before, after in zip(plain.phases(), scored.phases(), strict=True):
        assert after.parts == {**before.parts, "rewards": 1_950_000_000}  # half of the card's 3.9 GB
        assert after.total - before.total == pytest.approx(1.05 * 1_950_000_000, abs=1)
    written = [*lines(check_fit(scored, 24 * GIB))]
    assert written[0].split()[2:4] == ["weights", "rewards"]
    assert written[1].split()[2:4] == ["10.0", "1.8"]


def test_the_embeddings_that_stay_in_host_memory_are_counted():
    """Of each training prompt that the iterations draw at most, and of all held-out prompts of a process."""
    found = budget(train__iterations=10, train__groups=8)
    assert found.embeddings() == {"prompts": 80 + 256, "bytes": 80 * GIB // 512 + 256 * GIB // 1024}
    (line,) = (line for line in lines(check_fit(found, 80 * GIB)) if "host memory" in line)
    assert line.endswith("and at most 0.4 GiB of embeddings of 336 prompts")
    assert budget(train__iterations=10**6, train__groups=8).embeddings()["prompts"] == 1000 + 256
    spread = budget(train__iterations=10, train__groups=8, train__group_size=4, run__processes=16)
    assert spread.embeddings()["prompts"] == 10 * 2 + 16  # two roots a process, so at most two groups


@pytest.mark.parametrize(
    ("loads_later", "encoders", "size"),
    [(True, "offload", 19), (True, "free", 10), (True, "keep", 20), (False, "offload", 20), (False, "free", 20)],
)
def test_the_weights_in_host_memory_while_a_model_loads(loads_later, encoders, size):
    """Of 9 GiB of encoders, a VAE of 1 and a transformer of 10, which may load after the encoders were used."""
    found = budget(loads_later=loads_later, model__text_encoders=encoders)
    assert found.loading_bytes() == size * GIB
    assert f"host memory of each process: {size}.0 GiB of weights while the model loads" in "\n".join(
        lines(check_fit(found, 80 * GIB))
    )


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (8, "keeps the graphs of 64 rows (4.0 GiB) for the first update"),
        (4, "keeps the graphs of 32 rows (2.0 GiB), so the first update computes 32 rows again, which costs time"),
        (1, "keeps no graphs, so the first update computes 64 rows again, which costs time and changes no result"),
    ],
)
def test_a_plan_says_what_it_costs_to_keep_no_graphs(left, said):
    auto = budget()
    assert said in "\n".join(lines(check_fit(auto, auto.peak() + left * GIB)))


def test_a_copy_that_drafts_are_sampled_by_is_counted_while_it_is_there():
    """In int8 a byte for each weight of the block, a float32 scale for each row, and the sums of a product of each row."""
    plain, found = phases(), phases(**DRAFTS)
    for name in ("rollout", "decode", "reward", "update"):
        assert found[name]["weights"] - plain[name]["weights"] == COPY
    assert found["encode"] == plain["encode"]
    assert found["rollout"]["activations"] - plain["rollout"]["activations"] == 2 * 5000 * (4 + 4)  # two rows
    plain, found = phases(model__lora=None), phases(model__lora=None, **DRAFTS)
    for name, more in (("rollout", COPY), ("decode", COPY), ("update", 0)):  # gone when the draft is sampled
        assert found[name]["weights"] - plain[name]["weights"] == more


def test_a_copy_in_nf4_needs_the_weights_that_are_made_anew():
    plain, found = phases(), phases(train__draft={"precision": "nf4"})
    assert found["rollout"]["activations"] - plain["rollout"]["activations"] == 2 * 2 * LAYER  # values, and weights


def test_what_a_copy_of_drafts_does_not_go_with_is_not_offered():
    drafting = budget(**DRAFTS, run__processes=2)
    keys = keys_of(drafting.switches())
    assert "train.draft.precision" in keys
    assert not keys & {"model.quantise", "run.sharding"}
    without = keys_of(drafting.with_setting("train.draft.precision", None).switches())
    assert without - keys == {"model.quantise", "run.sharding"}
    assert "train.draft.precision" not in without


@pytest.mark.usefixtures("kept_trials")
def test_plan_says_whether_a_run_fits_and_what_to_set(workplace, monkeypatch, capsys):
    monkeypatch.setattr(plan_command, "FIRST", 0.0)
    assert main(["plan", "tiny.yaml", "--gpu-memory", "2", "--format", "json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == "planning\n"
    found = json.loads(shown.out)["gpu"]
    assert found["fits"]
    assert [phase["phase"] for phase in found["phases"]] == ["encode", "rollout", "decode", "reward", "update"]
    assert found["phases"][4]["rows"] == 4
    assert found["rewards_not_counted"] == ["./mine.py:redness"]
    many = found["largest"]["train.micro_batch"] + 1
    assert main(["plan", "tiny.yaml", f"train.micro_batch={many}", "--gpu-memory", "2"]) == 0
    said = capsys.readouterr().out
    assert f"does not fit 2.0 GiB; it fits, with a peak of 2.0, if you set train.micro_batch={many - 1}" in said
    assert "not counted: the weights that ./mine.py:redness may load; a function without a model loads none" in said


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
    assert whole["rollout"]["weights"] - parts["rollout"]["weights"] == 10 * GIB * 3 // 4
    gathered = 2 * LAYER + round(2.4 * 2 * LAYER)  # the head, and a block and a half
    for name in ("rollout", "update"):
        assert parts[name]["activations"] - whole[name]["activations"] == gathered
    assert parts["encode"] == whole["encode"]


def test_processes_that_share_calls_have_a_part_of_what_comes_with_each_row():
    """A rule: nothing is measured anew."""
    measured = replace(TRIAL, update=Peaks(((GIB, 8 * GIB),)))
    one, four = phases(measured), phases(measured, run__processes=4, run__context_parallel=4)
    shared = {"rollout": 2 * GIB // 4, "update": GIB + 2 * 8 * GIB // 4}
    assert one["rollout"]["activations"] == 2 * GIB
    for name, parts in one.items():
        assert four[name] == parts | ({"activations": shared[name]} if name in shared else {})


def test_what_learns_in_shards_lies_in_parts_with_its_gradients_and_moments():
    full = {"model__lora": None, "run__processes": 4, "train__ema": None}
    whole, parts = phases(**full), phases(**full, run__sharding="fsdp2")
    for part in ("trained", "optimizer", "gradients"):
        assert parts["update"][part] == whole["update"][part] // 4 > 0
    assert parts["update"]["weights"] == whole["update"]["weights"]
    gathered = 2 * (2 * LAYER + round(2.4 * 2 * LAYER))  # in float32
    assert parts["rollout"]["activations"] - whole["rollout"]["activations"] == gathered


def test_graphs_of_a_rollout_are_counted_where_it_keeps_them():
    replayed, kept = phases(), phases(train__replay="never")
    for name in ("rollout", "decode", "update"):
        assert kept[name]["states"] - replayed[name]["states"] == 64 * GIB // 16
    few = phases(train__replay="never", model__gradient_checkpointing=True)
    assert few["update"]["states"] - replayed["update"]["states"] == 64 * GIB // 256
    shared = phases(train__replay="never", run__processes=4)
    assert shared["update"]["states"] == replayed["update"]["states"] // 4 + 16 * GIB // 16


def test_a_graph_of_each_call_has_copies_of_the_weights():
    """64 rows at two times are, in calls of 2, 32 calls; of four processes with 16 rows each it is 8."""
    copies = replace(TRIAL, graph=Kept(once=GIB, each=GIB // 16))
    assert budget(copies, train__replay="never").graph_bytes(2) == (32 + 4) * GIB
    assert budget(copies, train__replay="never", run__processes=4).graph_bytes(2) == (8 + 1) * GIB


def test_auto_keeps_graphs_that_take_half_of_what_is_left():
    """Of both steps, of the first one, or none."""
    auto, every = budget(), {"rows": 64, "bytes": 4 * GIB}
    for left, kept in ((8 * GIB, 2), (8 * GIB - 1, 1), (4 * GIB, 1), (4 * GIB - 1, 0), (-GIB, 0)):
        found = auto.kept_graphs(auto.peak() + left)
        assert found == {**every, "kept_rows": 32 * kept, "kept_bytes": 2 * GIB * kept}
    assert budget(train__replay="never").kept_graphs(GIB)["kept_rows"] == 64
    assert budget(train__replay="always").kept_graphs(2**50)["kept_rows"] == 0


def test_cuda_graphs_keep_the_activations_of_a_rollouts_call():
    plain, captured = budget(train__rollout_batch=3), budget(train__rollout_batch=3, model__cuda_graphs=True)
    more = [
        b.parts["activations"] - a.parts["activations"] for a, b in zip(plain.phases(), captured.phases(), strict=True)
    ]
    assert more == [0, *[3 * GIB] * (len(more) - 1)]


def test_the_largest_batch_beside_cuda_graphs_fits_and_one_more_row_does_not():
    for batches in ({}, {"train__rollout_batch": 3}):
        run, room = budget(train__micro_batch=2, model__cuda_graphs=True, **batches), 80 * GIB
        rows = run.largest(room)["train.micro_batch"]
        assert run.with_setting("train.micro_batch", rows).peak() <= room
        assert run.with_setting("train.micro_batch", rows + 1).peak() > room
    assert ("model.cuda_graphs", False) in run.switches()
