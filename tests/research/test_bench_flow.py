"""The benchmark of rollouts and updates, on real models' shapes that were made small."""

import json
from dataclasses import replace

import pytest
import torch

VAE = {"block_out_channels": [8, 8, 8, 8], "norm_num_groups": 4, "layers_per_block": 1}
SMALL = {
    "sd35-medium": {
        "transformer": {
            "num_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "caption_projection_dim": 32,
            "pos_embed_max_size": 16,
            "dual_attention_layers": [0],
        },
        "vae": VAE,
    },
    "flux1-dev": {
        "transformer": {
            "num_layers": 1,
            "num_single_layers": 1,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "axes_dims_rope": [4, 6, 6],
        },
        "vae": VAE,
    },
    "wan21-1.3b": {
        "transformer": {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 32},
        "vae": {"base_dim": 8},
    },
}
ENCODERS = {
    "text_encoder": {"intermediate_size": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2},
    "text_encoder_2": {"intermediate_size": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2},
    "text_encoder_3": {"d_ff": 16, "d_kv": 8, "num_heads": 2},
}


@pytest.fixture
def bench(script):
    return script("bench_flow")


@pytest.fixture
def small(bench, monkeypatch):
    """A size whose networks, pictures, groups and schedule are small; in float32, for bfloat16 takes long on some CPUs."""
    real, float32 = bench.flow_sizes.random_pipelines.folder, dict.fromkeys(bench.flow_sizes.DTYPES, torch.float32)
    monkeypatch.setattr(bench.flow_sizes, "DTYPES", float32)

    def made(name):
        changes = {**ENCODERS, **SMALL[name]}
        monkeypatch.setattr(bench.flow_sizes.random_pipelines, "folder", lambda path, _=None: real(path, changes))
        call = {"num_inference_steps": 3, "height": 32, "width": 32, "max_sequence_length": 8}
        if name == "wan21-1.3b":
            call["num_frames"] = 5
        size = replace(bench.flow_sizes.SIZES[name], rows=(2,), group=2, lora={"rank": 2, "alpha": 4}, call=call)
        monkeypatch.setattr(bench.flow_sizes, "SIZES", {name: size})
        return size

    return made


def test_every_size_takes_every_kind_of_run(bench):
    for size in bench.flow_sizes.SIZES.values():
        for kind in bench.EVERY:
            for rows in size.rows:
                assert bench.settings(size, kind, rows).train.micro_batch == rows


@pytest.mark.parametrize("name", SMALL)
def test_a_rollout_of_a_real_shape_is_paired_with_its_transformer(bench, small, name):
    size = small(name)
    found = bench.rollouts(name, 1, ["chain"])
    assert list(found) == [
        f"{name}, 2 rows: {told}" for told in ("rollout of a chain / bare", "noise of a chain / bare")
    ]
    assert all(ratio["median"] > 0 for ratio in found.values())
    policy, weights = bench.begun(size)
    assert all(p.requires_grad == ("lora" in path) for path, p in policy.modules["transformer"].named_parameters())
    assert weights.parameters
    guided = 2 if name == "wan21-1.3b" else 1
    trainer = bench.trainer_of(policy, weights, bench.settings(size, "chain", 2))
    bench.grown(trainer)
    with bench.recorded(policy) as calls:
        bench.grown(trainer)
    assert len(calls) == 3 * guided


def test_groups_of_a_rollout_grow_side_by_side_and_fill_calls(bench, small, monkeypatch):
    small("flux1-dev")
    works = {}
    monkeypatch.setattr(bench, "in_turns", lambda made, rounds: works.update(made) or dict.fromkeys(made, (1.0,)))
    found = bench.rollouts("flux1-dev", 1, ["chain", "branch"], groups=2)
    assert all(name.startswith("flux1-dev, 2 rows, 2 groups: ") for name in found)
    tree = works["branch"]()
    calls = [len(evaluation.rows) for evaluation in tree.evaluations]
    assert calls == [2] * 5  # both roots share one, their children are in two at each of the steps that follow
    assert {tree.nodes[leaf].root.group for leaf in tree.leaves} == {0, 1}


@pytest.mark.parametrize(("there", "sizes"), [(False, 2), (True, 5)])
def test_real_sizes_and_their_memory_are_measured_where_there_is_a_gpu(bench, monkeypatch, tmp_path, there, sizes):
    asked, real = [], ["sd35-medium", "flux1-dev", "wan21-1.3b"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(bench, "ratios", lambda rounds, names, parts, kinds, groups: asked.append((names, parts)) or {})
    monkeypatch.setattr(bench, "memory", lambda name, kinds: {name: 1.0})
    monkeypatch.setattr("sys.argv", ["bench_flow.py", "--json", str(tmp_path / "found.json")])
    bench.main()
    ((names, parts),) = asked
    assert names == ["shapes", "wide", *real][:sizes]
    assert parts == ["rollout", "inside", "update", "fullness", "decoding"]
    told = json.loads((tmp_path / "found.json").read_text())
    assert told["numbers"] == (dict.fromkeys(real, 1.0) if there else {})


@pytest.mark.parametrize("name", SMALL)
def test_calls_of_fewer_rows_are_parts_of_a_full_one(bench, small, monkeypatch, name):
    small(name)
    works = {}
    monkeypatch.setattr(bench, "bare", lambda policy, calls, learns: works.setdefault(len(calls), calls))
    monkeypatch.setattr(bench, "in_turns", lambda works, rounds: dict.fromkeys(works, (1.0,)))
    ((told, _),) = bench.fullness(name, 1).items()
    assert told == f"{name}, 2 rows: forward and backward passes in 2 calls / in one"
    ((whole,), parts) = works[1], works[2]
    for key, value in whole.items():
        if isinstance(value, torch.Tensor):
            shared = not value.ndim or key in ("img_ids", "txt_ids")  # places, the same for all rows
            assert torch.equal(parts[0][key] if shared else torch.cat([part[key] for part in parts]), value)


def test_a_rollout_is_longer_than_its_calls_of_the_transformer(bench, small):
    small("flux1-dev")
    ((told, ratio),) = bench.inside("flux1-dev", 2, ["chain"]).items()
    assert told == "flux1-dev, 2 rows: rollout of a chain / transformer in it"
    assert 1 < ratio["low"] <= ratio["high"]


def test_an_iteration_on_a_gpu_stands_beside_its_plan(bench, small, monkeypatch):
    small("sd35-medium")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 * 2**30, 80 * 2**30))
    found = bench.memory("sd35-medium", ["chain"])
    place = "sd35-medium, 2 rows: iteration of a chain, "
    told = {name.removeprefix(place) for name in found}
    parts = {f"seconds of the {part}{planned}" for part in ("rollout", "update") for planned in ("", " / planned")}
    assert told == {"largest |log ratio|", "peak / planned", "peak GiB", *parts}
    assert found[f"{place}largest |log ratio|"] < 1e-3
    assert all(found[place + name] > 0 for name in told if "ratio" not in name)


@pytest.mark.parametrize(
    ("device", "known"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA A10G", None),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_a_gpu_is_known_by_a_word_of_its_name(bench, monkeypatch, device, known):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    assert bench.gpu_type() == known
    assert known is not None or bench.planned_seconds(None) is None


@pytest.mark.parametrize(
    ("has_gpu", "words", "said"),
    [
        (False, [], "--only memory measures nothing of flux1-dev on this machine"),
        (True, ["--kind", "brush"], "--only memory measures --kind chain and window, not brush"),
        (True, ["--groups", "2"], "--groups 2: it goes with --only rollout and no other part"),
    ],
)
def test_what_measures_nothing_is_refused(bench, monkeypatch, capsys, has_gpu, words, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr("sys.argv", ["bench_flow.py", "--only", "memory", "--size", "flux1-dev", *words])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("groups", ["0", "1000000"])
def test_as_many_groups_as_there_are_prompts_are_measured(bench, monkeypatch, capsys, groups):
    monkeypatch.setattr("sys.argv", ["bench_flow.py", "--only", "rollout", "--groups", groups])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2
    most = bench.flow_sizes.most_groups()
    assert f"--groups {groups}: must be 1 to {most}, the prompts of the embedded model" in capsys.readouterr().err


def test_random_networks_have_numbers_everywhere_and_tied_weights_once(bench):
    made = bench.flow_sizes.random_pipelines
    with made.folder("stabilityai/stable-diffusion-3.5-medium", {**ENCODERS, **SMALL["sd35-medium"]}) as place:
        pipe = made.pipeline(place, torch.float32, torch.device("cpu"))
    for network in (pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_3):
        tensors = [*network.parameters(), *network.buffers()]
        assert not any(x.is_meta for x in tensors)
        assert all(x.isfinite().all() for x in tensors)
    assert pipe.text_encoder_3.shared.weight is pipe.text_encoder_3.encoder.embed_tokens.weight
    assert pipe.transformer.config.joint_attention_dim == 4096  # what is not changed is the released model's
