"""The benchmark of rollouts and updates, on real models' shapes that were made small."""

import pytest
import torch

REAL = ("sd35-medium", "flux1-dev", "wan21-1.3b")


@pytest.fixture
def bench(script):
    return script("bench_flow")


@pytest.fixture
def small(bench, monkeypatch):
    """A real size made small; in float32, for bfloat16 takes long on some CPUs."""

    def made(name):
        size = bench.flow_sizes.shrunk(name)
        monkeypatch.setattr(bench.flow_sizes, "SIZES", {name: size})
        return size

    return made


def test_every_size_takes_every_kind_of_run(bench):
    for size in bench.flow_sizes.SIZES.values():
        for kind in bench.EVERY:
            for rows in size.rows:
                assert bench.settings(size, kind, rows).train.micro_batch == rows


@pytest.mark.parametrize("name", REAL)
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
def test_real_sizes_are_measured_where_there_is_a_gpu(bench, monkeypatch, there, sizes):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(bench, "ratios", lambda rounds, names, parts, kinds, groups: asked.append((names, parts)) or {})
    monkeypatch.setattr("sys.argv", ["bench_flow.py"])
    bench.main()
    ((names, parts),) = asked
    assert names == ["shapes", "wide", *REAL][:sizes]
    assert parts == ["rollout", "inside", "update", "fullness", "decoding"]


@pytest.mark.parametrize("name", REAL)
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "decoding"], "--only decoding measures nothing of flux1-dev on this machine"),
        (["--groups", "2"], "--groups 2: it goes with --only rollout and no other part"),
    ],
)
def test_what_measures_nothing_is_refused(bench, monkeypatch, capsys, words, said):
    monkeypatch.setattr("sys.argv", ["bench_flow.py", "--size", "flux1-dev", *words])
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
    changes = bench.flow_sizes.shrunk("sd35-medium").changes
    with made.folder("stabilityai/stable-diffusion-3.5-medium", changes) as place:
        pipe = made.pipeline(place, torch.float32, torch.device("cpu"))
    for network in (pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_3):
        tensors = [*network.parameters(), *network.buffers()]
        assert not any(x.is_meta for x in tensors)
        assert all(x.isfinite().all() for x in tensors)
    assert pipe.text_encoder_3.shared.weight is pipe.text_encoder_3.encoder.embed_tokens.weight
    assert pipe.transformer.config.joint_attention_dim == 4096  # what is not changed is the released model's
