"""Language models start from LoRA files of peft, from exports and from runs."""

import peft
import pytest
import torch
from in_turn import after_first_step
from released import released
from runs import metrics, weights
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from flowgrpo.cli import main
from flowgrpo.commands.runs import train as run
from flowgrpo.errors import InputError
from flowgrpo.mdlm.config import TextModel
from flowgrpo.mdlm.models import initial_lora, memory_estimate
from flowgrpo.mdlm.models.load import load_adapter, load_predictor
from flowgrpo.mdlm.outputs.export import write_weights
from flowgrpo.mdlm.setup import policy_and_weights

IDS = torch.tensor([[3, 4, 1, 5]])
LORA = {"rank": 2, "alpha": 5.0}
KL = {"algorithm__preset": "gdpo", "algorithm__objective__kl": {"beta": 0.5}}


def saved(model, folder, **options):
    """A random adapter of the tiny model, as peft saves it; returns the model with it."""
    torch.manual_seed(1)
    given = {"r": 2, "lora_alpha": 5, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": False, **options}
    network = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), peft.LoraConfig(**given))
    network.save_pretrained(folder)
    return network


@pytest.mark.parametrize(
    "options", [{}, {"rank_pattern": {"up_proj": 3}, "alpha_pattern": {"q_proj": 9}}, {"use_rslora": True}]
)
def test_an_adapter_of_peft(model, tmp_path, options):
    theirs = saved(model, tmp_path / "lora", **options)
    settings = TextModel(path=str(model), lora={"path": str(tmp_path / "lora")})
    network = AutoModelForCausalLM.from_pretrained(model)
    (adapter,) = initial_lora.adapters(settings, initial_lora.read(settings), network).values()
    adapter.inject(network)
    with torch.no_grad():
        assert torch.equal(network(IDS).logits, theirs(IDS).logits)
        with theirs.disable_adapter():
            assert not torch.allclose(network(IDS).logits, theirs(IDS).logits, atol=1e-3)


def test_a_run_from_an_export_or_a_run_begins_where_that_ended(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run.train_config(settings(model__lora=LORA, train__learning_rate=0.05))
    assert main(["export", str(done.folder), "--out", "out"]) == 0
    earned = [line["reward/mean"] for line in metrics(done.folder, "eval")]
    for name, place in (("u", "out"), ("v", "runs/demo")):
        begun = run.train_config(settings(model__lora={"path": place}, run__name=name, train__iterations=1, **KL))
        assert metrics(begun.folder, "eval")[0]["reward/mean"] == earned[-1] != earned[0]
        assert metrics(begun.folder)[0]["policy/max_abs_log_ratio"] == 0


def test_shifts_that_an_export_cannot_hold_are_refused_by_name(settings, model, tmp_path, capsys):
    saved(model, tmp_path / "lora")
    file = tmp_path / "lora" / "adapter_model.safetensors"
    name = "base_model.model.model.layers.0.input_layernorm.diff"
    width = AutoConfig.from_pretrained(model).hidden_size
    save_file(load_file(file) | {name: torch.ones(width)}, file)
    done = run.train_config(settings(model__lora={"path": str(tmp_path / "lora")}, train__iterations=1))
    assert main(["export", str(done.folder), "--out", str(tmp_path / "out")]) == 2
    assert "shifts model.model.layers.0.input_layernorm.weight, which peft's file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_all_weights_may_be_trained_from_an_adapter_that_is_merged(settings, model, tmp_path):
    theirs = saved(model, tmp_path / "lora")
    chosen = settings(model__lora=None, model__merge=str(tmp_path / "lora"), train__iterations=1, **KL)
    policy, trained = policy_and_weights(chosen, torch.device("cpu"))
    with torch.no_grad():
        torch.testing.assert_close(policy.predictor.model(IDS).logits, theirs(IDS).logits, atol=1e-5, rtol=1e-4)
    assert trained.lora is None
    done = run.train_config(chosen)
    assert metrics(done.folder)[0]["policy/max_abs_log_ratio"] == 0
    assert (done.folder / "start.safetensors").is_file()


def test_a_resumed_run_needs_no_file_and_is_exact(settings, model, tmp_path):
    saved(model, tmp_path / "lora")
    options = {"model__lora": {"path": str(tmp_path / "lora")}, **KL}
    whole = run.train_config(settings(**options, run__name="whole"))
    after_first_step(tmp_path / "runs", "whole", "half")
    (tmp_path / "lora").rename(tmp_path / "elsewhere")
    half = run.train_config(settings(**options, run__name="half", run__resume=True))
    resumed = weights(half.folder, 2)
    assert all(torch.equal(tensor, resumed[key]) for key, tensor in weights(whole.folder, 2).items())
    kl = [[line["policy/kl"] for line in metrics(each.folder)] for each in (whole, half)]
    assert kl[0] == kl[1]


@pytest.mark.parametrize(("target", "apart"), [("reference", False), ("base", True)])
def test_the_kl_is_from_the_start_unless_the_base_is_asked_for(settings, model, tmp_path, target, apart):
    saved(model, tmp_path / "lora")
    options = {"model__lora": {"path": str(tmp_path / "lora")}, "train__updates": 1, "train__iterations": 1}
    done = run.train_config(settings(**options, **KL, algorithm__objective__kl__target=target))
    (line,) = metrics(done.folder)
    assert (line["policy/kl"] > 1e-9) is apart


def test_memory_counts_the_files_adapters_and_the_kept_start(settings, model, tmp_path):
    theirs = saved(model, tmp_path / "lora")
    own = sum(p.numel() for name, p in theirs.named_parameters() if "lora_" in name)
    lora = {"path": str(tmp_path / "lora")}
    plain, base, held = (
        memory_estimate.memory_estimate(settings(model__lora=lora, algorithm__objective__kl=kl))["gpu_bytes"]
        for kl in ({"beta": 0.0}, {"beta": 0.5, "target": "base"}, {"beta": 0.5})
    )
    assert plain == base == held - 4 * own


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"r": 4}, r"model\.lora\.rank: 2 is asked for, and model\.lora\.path has 4 at "),
        ({"use_dora": True}, r"model\.lora\.path: \S+ is a DoRA \("),
        ({"modules_to_save": ["lm_head"]}, r"holds base_model\.model\.lm_head\.weight, which is no matrix of a LoRA"),
    ],
)
def test_what_a_file_tells_is_refused_before_the_model(settings, model, tmp_path, monkeypatch, change, said):
    saved(model, tmp_path / "lora", **change)
    monkeypatch.setattr("flowgrpo.mdlm.setup.load_predictor", lambda *a, **k: pytest.fail("the model was loaded"))
    with pytest.raises(InputError, match=said):
        run.train_config(settings(model__lora={"path": str(tmp_path / "lora"), "rank": 2}))


def test_an_adapter_of_another_model_is_refused(model, tmp_path):
    saved(model, tmp_path / "lora")
    sizes = AutoConfig.from_pretrained(model)
    sizes.hidden_size, sizes.head_dim = 64, 16
    wider = TextModel(path="wider", lora={"path": str(tmp_path / "lora")})
    said = r"its adapter of \S+up_proj is for a weight of 48 x 32, in wider it has 48 x 64"
    with pytest.raises(InputError, match=said):
        initial_lora.adapters(wider, initial_lora.read(wider), AutoModelForCausalLM.from_config(sizes))


def test_names_and_ranks_of_a_released_models_own_code_there_and_back(settings, tmp_path):
    folder = released("llada", tmp_path / "llada")
    tensors = {}
    block = "base_model.model.model.transformer.blocks.1"
    for layer, rank in (("q_proj", 2), ("attn_out", 3)):
        name = f"{block}.{layer}"
        tensors |= {f"{name}.lora_A.weight": torch.randn(rank, 32), f"{name}.lora_B.weight": torch.randn(32, rank)}
    (tmp_path / "lora").mkdir()
    save_file(tensors, tmp_path / "lora" / "adapter_model.safetensors")
    options = peft.LoraConfig(r=2, lora_alpha=5, rank_pattern={"attn_out": 3}, alpha_pattern={"attn_out": 7})
    options.save_pretrained(tmp_path / "lora")
    chosen = settings(model__path=str(folder), model__length=8, model__lora={"path": str(tmp_path / "lora")})
    policy, trained = policy_and_weights(chosen, torch.device("cpu"))
    layer = policy.predictor.model.model.layers[1].self_attn.o_proj
    assert layer.scaling["default"] == 7 / 3
    assert torch.equal(layer.lora_A["default"].weight, tensors[f"{block}.attn_out.lora_A.weight"])
    write_weights(chosen.model, policy, trained, tmp_path / "out")
    fresh, _ = load_predictor(str(folder))
    with torch.no_grad():
        before, expected = fresh.logits(IDS), policy.predictor.logits(IDS)
        load_adapter(fresh, tmp_path / "out")
        assert torch.equal(fresh.logits(IDS), expected)
        assert not torch.allclose(before, expected, atol=1e-3)
