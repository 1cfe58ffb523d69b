"""`flowgrpo sample --groups`: the samples of a run's first iteration, in a folder that a run trains from."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator
from conftest import furnished
from opened import Opened
from runs import CALL, metrics

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.data import prompts, stored
from flowgrpo.flow import setup
from flowgrpo.flow.diagnostics import spectrum
from flowgrpo.flow.offline import model_fingerprint
from flowgrpo.flow.outputs import group_sampling
from flowgrpo.training.run.run_data import RunData
from flowgrpo.training.scoring import scorer

ONE = ["train.groups=1", "train.updates=1", "algorithm.preset=rwr"]


@pytest.fixture(scope="module")
def sampled(tiny_model, tmp_path_factory):
    """A folder with the groups of the small run."""
    with furnished(tmp_path_factory.mktemp("sampled"), tiny_model) as folder:
        assert main(["sample", "tiny.yaml", "--groups", "o", "algorithm.preset=rwr", "train.micro_batch=4"]) == 0
    return folder / "o"


@pytest.fixture
def stored_groups(workplace, sampled):
    """A workplace with these groups, in its folder `o`."""
    shutil.copytree(sampled, workplace / "o")
    return workplace


@pytest.fixture
def one_prompt(workplace):
    (workplace / "prompts.txt").write_text("a red circle\n")
    return workplace


def asked(model, *options, out="o"):
    call = [f"{key}={value}" for key, value in CALL.items()]
    return ["sample", str(model), "--groups", out, *options, *call]


def test_a_group_is_the_one_that_a_run_s_first_iteration_samples(one_prompt):
    assert main(["sample", "tiny.yaml", "--groups", "o", *ONE, "run.seed=7"]) == 0
    found = stored.read(Path("o"))
    settings = config.load("tiny.yaml", [*ONE, "run.seed=7"])
    rows = prompts.load_split(settings.prompts, "train")
    data = RunData(rows, [], *scorer.rewards(settings.rewards))
    run = Opened(setup.trainer(settings, Accelerator(cpu=True), data))
    batch = run.rollout(0, run.groups(0))
    assert torch.equal(found.latents([(0, member) for member in range(4)])[0], batch.tree.samples[0])
    assert found.groups[0].rewards[:, 0].tolist() == batch.scores.values[:, 0].tolist()
    assert found.groups[0].seeds == [batch.tree.nodes[leaf].root.row.seed for leaf in batch.tree.leaves]
    assert found.manifest["sigmas"] == list(run.policy.sigmas)
    assert len(set(found.groups[0].seeds)) == 4


def test_a_model_is_sampled_without_a_config(workplace, tiny_model, capsys):
    options = ["--reward", "./mine.py:redness", "--group-size", "3", "--prompts", "prompts.txt", "--seed", "5"]
    assert main([*asked(tiny_model, *options), "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)["manifest"]
    assert (told["groups"], told["group_size"], told["seed"], told["rewards"]) == (4, 3, 5, ["redness"])
    texts = [group.prompt.text for group in stored.read(Path("o")).groups]
    assert texts == Path("prompts.txt").read_text().splitlines()


def test_a_folder_that_was_cut_off_becomes_the_one_that_was_not(workplace, monkeypatch):
    monkeypatch.setattr(stored, "SHARD", 1)
    (workplace / "prompts.txt").write_text("a red circle\ntwo blue square\na green circle\n")
    command = ["sample", "tiny.yaml", "algorithm.preset=rwr", "train.micro_batch=4"]
    assert main([*command, "--groups", "whole"]) == 0
    real = group_sampling.rollout
    calls = []

    def cut_off(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(group_sampling, "rollout", cut_off)
    assert main([*command, "--groups", "cut"]) == 130
    assert not Path("cut/manifest.json").exists()
    assert main([*command, "--groups", "cut"]) == 0
    assert len(calls) == 3 + 1  # two of three groups were there
    for path in Path("whole").iterdir():
        assert (Path("cut") / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.usefixtures("stored_groups")
def test_a_run_trains_from_a_folder_and_its_plan_counts_no_rollout(capsys, monkeypatch):
    monkeypatch.setattr(spectrum, "EVALUATIONS", 60)
    run = ["tiny.yaml", "algorithm.preset=gdro", "data.groups=o", "train.updates=1", "train.micro_batch=8"]
    assert main(["plan", *run, "--format", "json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["model_evaluations"]["rollout"] == planned["decoded"] == planned["reward_calls"] == 0
    assert planned["picture"] == []
    assert main(["doctor", *run]) == 0
    assert "s for an iteration of 8 samples, without the rewards" in capsys.readouterr().out
    assert main(["train", *run]) == 0
    told = metrics(Path("runs/t"))
    assert [line["cost/model_evaluations"] for line in told] == [planned["model_evaluations"]["update"]] * 2
    assert all(line["policy/updates"] == 1 and line["cost/decoded"] == 0 for line in told)
    assert [line["reward/count"] for line in metrics(Path("runs/t"), "eval")] == [3, 3, 3]


@pytest.mark.usefixtures("stored_groups", "unloaded")
def test_another_model_precision_or_call_is_one_sentence(capsys):
    run = ["algorithm.preset=gdro", "data.groups=o", "train.updates=1"]
    for override, said in (
        ("model.call.height=32", "data.groups: o has samples of a call with height 16, and model.call has 32; take 16"),
        ("model.dtype=bfloat16", "data.groups: o has samples of a model in float32; set model.dtype=float32"),
        ("model.path=shapes", "data.groups: o has samples of another model"),
        ("train.group_size=5", "train.group_size: 5 is more than the 4 samples of a group in o; take that or less"),
        ("rewards=shapes", "rewards: the stored groups have no reward 'shapes'"),
        ("data.groups=p", "data.groups: p holds no groups"),
    ):
        for command in ("plan", "train"):
            capsys.readouterr()
            assert main([command, "tiny.yaml", *run, override]) == 2
            told = capsys.readouterr().err
            assert told.startswith(f"flowgrpo: {said}")
            assert told.count("\n") == 1


def test_the_fingerprint_is_that_of_the_weights(tiny_model, tmp_path):
    before = model_fingerprint.fingerprint(str(tiny_model))
    shutil.copytree(tiny_model, tmp_path / "copy")
    assert model_fingerprint.fingerprint(str(tmp_path / "copy")) == before
    (tmp_path / "copy" / "README.md").write_text("of no matter")
    assert model_fingerprint.fingerprint(str(tmp_path / "copy")) == before
    (weights,) = (tmp_path / "copy" / "transformer").glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert model_fingerprint.fingerprint(str(tmp_path / "copy")) != before


def test_another_variant_of_a_model_is_another_model(tiny_model):
    found = [model_fingerprint.fingerprint(str(tiny_model), variant) for variant in (None, "fp16", "bf16")]
    assert len(set(found)) == 3
    assert found[0] == model_fingerprint.fingerprint(str(tiny_model))


def test_a_model_of_the_hub_is_known_by_its_commit(monkeypatch):
    monkeypatch.setattr("flowgrpo.flow.pipeline.loading.load.index_of", lambda path: {"transformer": ["a", "b"]})
    snapshot = "/cache/models--owner--name/snapshots/0123abc/model_index.json"
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda path, file: snapshot)
    assert model_fingerprint.fingerprint("owner/name") == "owner/name@0123abc"
    assert model_fingerprint.fingerprint("owner/name", "fp16") == "owner/name@0123abc:fp16"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["shapes", "--prompt", "a"], "give either --out DIR"),
        (["shapes", "--prompt", "a", "--out", "o", "--groups", "p"], "give either --out DIR"),
        (["shapes", "--prompt", "a", "--out", "o", "--reward", "shapes"], "--reward: it is for --groups DIR"),
        (["shapes", "--prompt", "a", "--groups", "o"], "--reward: groups are scored as they are sampled"),
        (["shapes", "--groups", "o", "--reward", "shapes"], "give either --prompt TEXT"),
        (["tiny.yaml", "--groups", "o", "--seed", "3"], "--seed: tiny.yaml is a config, which has a key for that"),
        (["tiny.yaml", "--groups", "o", "--text-encoders", "keep"], "--text-encoders: tiny.yaml is a config"),
        (
            ["tiny.yaml", "--groups", "o", "algorithm.preset=branch_grpo"],
            "algorithm.tree: groups are the ends of chains, not of",
        ),
        (["tiny.yaml", "--groups", "o", "train.draft={pool: 2}"], "train.draft: stored groups are whole"),
        (["tiny.yaml", "--groups", "prompts.txt"], "--groups: prompts.txt cannot be written to"),
        (["digits", "--prompt", "1", "--groups", "o", "--reward", "shapes"], "model.path: digits is a language model"),
    ],
)
def test_what_cannot_be_sampled_is_one_sentence_before_the_model(workplace, unloaded, capsys, arguments, said):
    assert main(["sample", *arguments]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"flowgrpo: {said}")
    assert told.count("\n") == 1
    assert not Path("o").exists()


def test_paths_of_groups_in_a_config_are_relative_to_it(stored_groups, monkeypatch):
    written = yaml.safe_load(Path("tiny.yaml").read_text())
    written |= {"data": {"groups": "./o"}, "algorithm": {"preset": "gdro"}}
    Path("tiny.yaml").write_text(yaml.safe_dump(written))
    (stored_groups / "elsewhere").mkdir()
    monkeypatch.chdir(stored_groups / "elsewhere")
    assert Path(config.load("../tiny.yaml").data.groups).resolve() == stored_groups / "o"
