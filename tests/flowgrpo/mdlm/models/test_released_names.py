"""Released models without their code: the logits that their code gives, and all that a model of transformers' own can do."""

import itertools
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from peft import PeftModel
from released import BLOCKWISE, MASK, NAMES, REMOTE, released
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.commands.runs import train as run
from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.decoders import build
from flowgrpo.mdlm.methods.presets import PRESETS
from flowgrpo.mdlm.models import architectures, memory_estimate
from flowgrpo.mdlm.models.gradient_checkpointing import checkpoint_gradients
from flowgrpo.mdlm.models.load import load_adapter, load_predictor
from flowgrpo.mdlm.models.released_names import TYPES
from flowgrpo.mdlm.outputs.export import write_weights
from flowgrpo.mdlm.policy import TextPolicy
from flowgrpo.mdlm.setup import policy_and_weights
from flowgrpo.training.checkpoints import checkpoint

VECTORS = json.loads((Path(__file__).parents[3] / "data" / "released_logits.json").read_text())
IDS = torch.tensor(VECTORS["ids"])
LORA = {"rank": 2, "alpha": 4.0}
REWARD = "def letters(texts, prompts):\n    return [sum(c.isalpha() for c in text) / 8 for text in texts]\n"


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """A function of a name that gives its folder."""
    made = {}

    def folder(name):
        if name not in made:
            made[name] = released(name, tmp_path_factory.mktemp("released") / name)
        return made[name]

    return folder


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """A function of a folder and overrides that gives a small run."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(REWARD)
    prompts = ("ab", "Is 1 + 2 = 3?", "c", "To be, or")
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": p, "completion": p[:1] * 8}) + "\n" for p in prompts))

    def chosen(folder, **overrides):
        written = {
            "kind": "mdlm",
            "model": {"path": str(folder), "length": 8, "lora": None},
            "prompts": {"train": "rows.jsonl", "eval": "rows.jsonl"},
            "rewards": [{"use": "mine.py:letters"}],
            "train": {"iterations": 2, "groups": 2, "group_size": 4, "learning_rate": 0.001, "micro_batch": 16},
            "eval": {"every": 2, "prompts": 2, "save": 2},
            "run": {"dir": "runs", "checkpoint": {"every": 2}},
        }
        Path("run.yaml").write_text(json.dumps(written))
        return config.load("run.yaml", {key.replace("__", "."): value for key, value in overrides.items()})

    return chosen


def tensors(folder):
    return {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}


def change_config(folder, **keys):
    """The folder, with other values in its config.json."""
    file = Path(folder) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    return folder


def logits(predictor, ids=IDS):
    with torch.no_grad():
        return predictor.logits(ids)


@pytest.mark.parametrize("name", ["llada", "dream", "llada2", *BLOCKWISE])
def test_the_logits_are_those_of_the_released_code(folders, name):
    path = str(folders(name))
    model = architectures.load(path, path, json.loads((folders(name) / "config.json").read_text()), torch.float32)
    with torch.no_grad():
        found = model(IDS, attention_mask=torch.zeros(2, 1, 12, 12), use_cache=False).logits
    chosen = found[:, VECTORS["positions"]][..., VECTORS["tokens"]]
    torch.testing.assert_close(chosen, torch.tensor(VECTORS[name]), rtol=0, atol=2e-5)
    if name in NAMES:  # fewer tokens than a block of LLaDA2 has
        aligned = logits(load_predictor(path)[0])
        known = torch.arange(aligned.shape[-1]) != MASK
        about = found[:, :-1] if name == "dream" else found[:, 1:]
        torch.testing.assert_close(aligned[:, 1:, known], about[..., known])


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_folder_and_all_are_seen_but_padding(folders, name):
    predictor, tokenizer = load_predictor(str(folders(name)))
    assert (predictor.mask_id, predictor.pad_id, tokenizer.eos_token_id) == (97, 96, 96)
    assert tokenizer("a b\n")["input_ids"] == [66, 1, 67, 0]
    assert tokenizer.decode([66, 1, 67, 0]) == "a b\n"
    assert (predictor.form.attention, predictor.padded_form is None, predictor.shift) == ("4d", False, name == "dream")
    assert predictor.model.config._attn_implementation == "sdpa"


CACHES = [pair for pair in itertools.product(NAMES, ("prefix", "dual")) if pair != ("llada2", "dual")]


@pytest.mark.parametrize(("name", "cache"), CACHES)
def test_a_cache_that_is_renewed_at_every_token_is_exact(folders, name, cache):
    policy = TextPolicy(*load_predictor(str(folders(name))), 8)
    decoder = {"name": "random", "region": {"block_length": 1}}  # each block's first step runs the whole canvas
    exact = policy.sample(["ab", "To be"], 0, decoder)
    assert policy.sample(["ab", "To be"], 0, decoder | {"cache": cache}) == exact
    assert len(set(exact)) > 1
    written = {"name": "low_confidence", "region": {"block_length": 4}, "cache": cache}
    blocks = build(written, 8, 96, policy.predictor)
    before = policy.predictor.evaluations
    policy.generate(["ab"], blocks, [(0,)], 1)
    assert policy.predictor.evaluations - before == 8


@pytest.mark.parametrize("name", ["llada", "dream", "llada2"])
def test_gradient_checkpointing_changes_no_gradient(folders, name):
    where = torch.arange(12).expand(2, -1) % 3 == 2  # the head sees these tokens alone

    def gradients(checkpointed):
        predictor = load_predictor(str(folders(name)))[0]
        if checkpointed:
            checkpoint_gradients(predictor.model)
        clean = {} if predictor.block_size is None else {"clean": IDS}
        logits = predictor.logits_at(IDS.masked_fill(where, MASK), None, where, **clean)
        logits[logits.isfinite()].square().mean().backward()
        return {name: p.grad for name, p in predictor.model.named_parameters()}

    plain, checkpointed = gradients(False), gradients(True)
    assert all(float(g.abs().max()) > 0 for g in plain.values())
    assert all(torch.equal(checkpointed[key], gradient) for key, gradient in plain.items())


ZOO = [pytest.param(*each, marks=pytest.mark.zoo) for each in (("llada15", LORA), ("llada2", None))]


@pytest.mark.parametrize(("name", "lora"), [("llada", None), ("dream", None), ("llada2", LORA), *ZOO])
def test_a_run_of_each_is_sound_and_its_export_loads_back(folders, settings, monkeypatch, name, lora):
    folder = folders(name)
    chosen = settings(folder, model__lora=lora, eval__decoder={"name": "low_confidence", "steps": 1})
    Path("run.yaml").write_text(config.dump(chosen))
    assert main(["doctor", "run.yaml", "--format", "json"]) == 0
    done = run.train_config(chosen)
    assert [line["policy/skipped_updates"] for line in done.metrics if line["phase"] == "train"] == [0, 0]
    assert all(line["policy/max_abs_log_ratio"] < 1e-4 for line in done.metrics if line["phase"] == "train")
    assert main(["export", str(done.folder), "--out", "out"]) == 0
    policy, weights = policy_and_weights(chosen, torch.device("cpu"))
    start = logits(policy.predictor)
    checkpoint.load_weights(max((done.folder / "checkpoints").iterdir()), weights)
    with weights.averaged():
        trained = logits(policy.predictor)
    fresh, _ = load_predictor(str(folder) if lora else "out")
    if lora:
        load_adapter(fresh, Path("out"))
    else:
        written, before = tensors("out"), tensors(folder)
        assert {key: t.shape for key, t in written.items()} == {key: t.shape for key, t in before.items()}
        for file in folder.iterdir():  # its tokenizer and code, and its config but for the dtype
            if file.suffix == ".safetensors" or file.name == "model.safetensors.index.json":
                continue
            if file.name == "config.json":
                expected = json.loads(file.read_text())
                expected["dtype" if "dtype" in expected else "torch_dtype"] = "float32"
                assert json.loads(Path("out/config.json").read_text()) == expected
            else:
                assert (Path("out") / file.name).read_bytes() == file.read_bytes()
    torch.testing.assert_close(logits(fresh), trained, rtol=0, atol=1e-5)
    assert not torch.allclose(trained, start, rtol=0, atol=1e-4)
    card = Path("out/README.md").read_text()
    assert ("keeps in one matrix" in card) == (lora is not None and name == "llada2")
    monkeypatch.chdir("out")
    assert main(shlex.split(card.split("```sh\n")[1].split("```")[0])[1:]) == 0
    assert Path("samples/0000.json").read_text() == Path("sample-0.json").read_text()


def test_an_adapter_of_llada_has_the_names_of_the_released_code(folders, settings):
    """`peft` puts it into a module with those names, here made by hand of a Llama's layers."""
    done = run.train_config(settings(folders("llada"), model__lora=LORA))
    assert main(["export", str(done.folder), "--out", "out"]) == 0
    layers = ("q_proj", "k_proj", "v_proj", "attn_out")
    expected = sorted(f"model.transformer.blocks.{i}.{layer}" for i in range(2) for layer in layers)
    assert sorted(json.loads(Path("out/adapter_config.json").read_text())["target_modules"]) == expected
    assert {key.rpartition(".lora_")[0] for key in tensors("out")} == {f"base_model.model.{path}" for path in expected}

    inner = torch.nn.Module()
    inner.model, inner.forward = torch.nn.Module(), lambda: None
    blocks = [torch.nn.ModuleDict({layer: torch.nn.Linear(32, 32, bias=False) for layer in layers}) for _ in range(2)]
    inner.model.transformer = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList(blocks)})
    PeftModel.from_pretrained(inner, "out")
    state = tensors("out")
    layer = inner.model.transformer["blocks"][1]["attn_out"]
    name = "base_model.model.model.transformer.blocks.1.attn_out"
    torch.testing.assert_close(layer.lora_B["default"].weight, state[f"{name}.lora_B.weight"])
    assert float(state[f"{name}.lora_B.weight"].abs().max()) > 0


def test_adapters_of_llada2_are_on_its_linear_layers_not_on_stacked_experts(folders, settings):
    targets = {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "gate_proj"]}
    chosen = settings(folders("llada2"), model__lora=targets)
    policy, weights = policy_and_weights(chosen, torch.device("cpu"))
    for p in weights.parameters:
        p.data += 0.1
    write_weights(chosen.model, policy, weights, Path("out"))
    found = {key.removeprefix("base_model.model.model.").partition(".lora_")[0] for key in tensors("out")}
    assert found == {
        "layers.0.self_attn.q_proj", "layers.0.mlp.gate_proj",
        "layers.1.self_attn.q_proj", "layers.1.mlp.shared_experts.gate_proj",
    }  # fmt: skip
    fresh, _ = load_predictor(str(folders("llada2")))
    load_adapter(fresh, Path("out"))
    assert torch.equal(logits(fresh), logits(policy.predictor))


def test_a_pipeline_of_llada2_is_loaded_and_exported_as_one(settings, tmp_path):
    """The folder of diffusers' `LLaDA2Pipeline`, whose model has the names of the released code."""
    model = released("llada2", tmp_path / "pipe" / "model")
    (tmp_path / "pipe" / "tokenizer").mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (model / file).rename(tmp_path / "pipe" / "tokenizer" / file)
    (tmp_path / "pipe" / "model_index.json").write_text('{"_class_name": "LLaDA2Pipeline"}')
    policy, weights = policy_and_weights(settings(tmp_path / "pipe"), torch.device("cpu"))
    write_weights(settings(tmp_path / "pipe").model, policy, weights, tmp_path / "out")
    assert tensors("out/model").keys() == tensors(model).keys()
    assert json.loads(Path("out/model/config.json").read_text())["model_type"] == "llada2_moe"
    again, _ = load_predictor(str(tmp_path / "out"))
    assert torch.equal(logits(again), logits(policy.predictor))


# In a plain run; the other presets take the ways through a model that these and diffu_grpo take, which is above.
PLAIN = {("gdpo", "llada"), ("trace_rl", "dream"), ("trace_rl", "llada2")}


@pytest.mark.parametrize(
    ("preset", "name"),
    [pytest.param(*both, marks=() if both in PLAIN else pytest.mark.zoo) for both in itertools.product(PRESETS, NAMES)],
)
def test_every_preset_trains_two_iterations(folders, settings, preset, name):
    chosen = {"algorithm__hints__tail": 0} if preset == "igpo" else {}
    chosen["eval__decoder"] = {"name": "low_confidence", "steps": 1}
    done = run.train_config(settings(folders(name), algorithm__preset=preset, **chosen))
    for line in (line for line in done.metrics if line["phase"] == "train"):
        assert line["policy/skipped_updates"] == 0
        assert line["policy/max_abs_log_ratio"] is None or line["policy/max_abs_log_ratio"] < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_that_of_the_weights_and_adapters_of_the_class(folders, settings, name):
    count = sum(t.numel() for key, t in tensors(folders(name)).items() if not key.endswith("expert_bias"))
    assert memory_estimate.memory_estimate(settings(folders(name)))["gpu_bytes"] == count * 4 * 6  # with a reference
    chosen = settings(folders(name), model__lora=LORA)
    _, weights = policy_and_weights(chosen, torch.device("cpu"))
    adapters = sum(p.numel() for p in weights.parameters)
    assert memory_estimate.memory_estimate(chosen)["gpu_bytes"] == count * 4 + adapters * 4 * 5


@pytest.mark.parametrize(
    ("name", "changed", "sentence"),
    [
        ("llada", {"activation_type": "swiglu"}, 'says activation_type: "swiglu", a llada is known with "silu"'),
        ("llada", {"alibi": True}, "says alibi: true, a llada is known with false"),
        ("llada", {"include_qkv_bias": True}, "says include_qkv_bias: true"),
        ("llada", {"rope_theta": None}, "has no rope_theta, which every llada has"),
        ("llada", {"rotary_pct": 0.5}, "says rotary_pct: 0.5, which is not known of a llada"),
        ("llada", {"n_kv_heads": 2}, r"shape \[32, 32\], where LLaDA has \[16, 32\]"),
        ("llada", {"n_heads": 5}, "is not of a llada .* hidden size .32. is not a multiple"),
        ("llada", {"d_model": "x"}, "is not of a llada .*'hidden_size' expected int"),
        ("llada", {"n_layers": 3}, r"lacks 9 of the 30 weights of LLaDA \(model.layers.2.input_layernorm.weight,"),
        ("llada", {"n_layers": 1}, r"holds 9 tensors that LLaDA has no use for \(model.layers.1.input_layernorm"),
        (
            "dream",
            {"rope_scaling": {"type": "yarn"}},
            'says rope_scaling: {"type": "yarn"}, a Dream is known with null',
        ),
        ("dream", {"use_sliding_window": True}, "says use_sliding_window: true"),
        ("llada2", {"score_function": "softmax"}, 'says score_function: "softmax"'),
        ("llada2", {"use_bias": True}, "says use_bias: true"),
    ],
)
def test_a_config_of_another_model_is_refused_in_a_sentence(tmp_path, capsys, name, changed, sentence):
    folder = change_config(released(name, tmp_path / name), **changed)
    with pytest.raises(InputError, match=sentence) as raised:
        load_predictor(str(folder))
    assert str(raised.value).startswith("model.path: ")
    assert "\n" not in str(raised.value)
    assert "REPORT" not in capsys.readouterr().err


@pytest.mark.parametrize(("kept", "said"), [(0, "lacks model-00002-of-00002.safetensors, which"), (1000, "is cut off")])
def test_a_shard_that_is_gone_or_cut_is_a_sentence(tmp_path, kept, said):
    shard = released("dream", tmp_path / "x") / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()[:kept]
    shard.unlink()
    if kept:
        shard.write_bytes(content)
    with pytest.raises(InputError, match=f"model.path: .* {said} "):
        load_predictor(str(tmp_path / "x"))


def test_grouped_heads_tied_embeddings_and_more_rows_than_tokens(tmp_path):
    """What no public LLaDA has and its config can say, against a Llama with the same weights."""
    folder = released("llada", tmp_path / "x", n_kv_heads=2, weight_tying=True, embedding_size=128, mlp_hidden_size=40)
    model = load_predictor(str(folder))[0].model
    assert isinstance(model, LlamaForCausalLM)
    kept = tensors(folder)
    assert torch.equal(model.lm_head.weight, kept["model.transformer.wte.weight"])
    assert model.lm_head.weight.shape == (128, 32)
    model.save_pretrained(tmp_path / "again")
    again = tensors(tmp_path / "again")
    assert again.keys() == kept.keys()
    assert all(torch.equal(again[key], kept[key]) for key in kept)


def test_code_of_the_folder_is_never_run_where_it_is_known(folders):
    folder = folders("llada")
    assert (folder / "modeling_llada.py").read_text() == REMOTE
    assert load_predictor(str(folder), trust_remote_code=True)[0].padded_form is not None


def test_code_that_fails_under_this_transformers_is_a_sentence_with_both_versions(folders, tmp_path):
    folder = change_config(released("llada", tmp_path / "unknown"), model_type="lladax")
    with pytest.raises(InputError, match=r"brings its own code, set model\.trust_remote_code"):
        load_predictor(str(folder))
    said = f"is a lladax, whose own code is of transformers 4.46.3 and fails with {transformers.__version__} (RuntimeError: "
    with pytest.raises(InputError, match=re.escape(said)):
        load_predictor(str(folder), trust_remote_code=True)


def test_files_of_a_hub_repository_come_along_by_its_snapshot(folders, tmp_path, monkeypatch):
    asked, place = {}, str(folders("llada2"))
    monkeypatch.setattr(architectures, "snapshot_download", lambda name, **own: asked.update({name: own}) or place)
    architectures.copy_beside("inclusionAI/LLaDA2.0-mini", tmp_path, torch.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "modeling_llada2_moe.py").read_text() == REMOTE
    assert not list(tmp_path.glob("*safetensors*"))
    patterns = asked["inclusionAI/LLaDA2.0-mini"]
    assert "*.safetensors" not in patterns["allow_patterns"]
    assert patterns["ignore_patterns"] == ["*.index*.json"]


def test_another_model_that_calls_itself_llada_is_none(folders, tmp_path):
    folder = shutil.copytree(folders("llada"), tmp_path / "moe")
    change_config(folder, num_experts=64, hidden_size=32)
    with pytest.raises(InputError, match=r"brings its own code, set model\.trust_remote_code"):
        load_predictor(str(folder))


def test_leave_for_remote_code_changes_no_sentence_where_none_runs(folders, tmp_path):
    folder = shutil.copytree(folders("llada"), tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    said = []
    for trusted in (False, True):
        with pytest.raises(InputError) as error:
            load_predictor(str(folder), trust_remote_code=trusted)
        said.append(str(error.value))
    assert said[0] == said[1]
    assert "has no tokenizer" in said[0]


def test_the_released_types_are_those_of_the_table():
    assert set(TYPES) == set(architectures.ARCHITECTURES)
