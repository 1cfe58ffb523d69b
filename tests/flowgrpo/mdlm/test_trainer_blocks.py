"""Training of a block-causal model through the command's own door, and what is known of model types."""

import json

import pytest
import torch
from predictors import MASK, PAD, llama, qwen, qwen3
from released import qwen_tokenizer
from runs import metrics

from flowgrpo.cli import main
from flowgrpo.commands.runs import train as run
from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.decode import decode
from flowgrpo.mdlm.decoding.decoders import build
from flowgrpo.mdlm.decoding.network.block_attention import find_block_size
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from flowgrpo.mdlm.doctor import examine
from flowgrpo.mdlm.methods.presets import PRESETS
from flowgrpo.mdlm.models.load import load_predictor
from flowgrpo.mdlm.planning.decoder_steps import count_decoder_steps
from flowgrpo.mdlm.planning.plan import plan, predict_cost

BLOCK = {"model__attention": "block", "model__block_size": 4, "model__length": 7, "train__group_size": 4}


PLAIN = ("diffu_grpo", "gdpo", "just_grpo", "trace_rl", "co_grpo", "igpo")  # which the estimates of others are like


@pytest.mark.parametrize(
    "preset", [pytest.param(preset, marks=() if preset in PLAIN else pytest.mark.zoo) for preset in PRESETS]
)
def test_two_iterations_begin_without_drift_and_cost_what_was_planned(settings, preset):
    chosen = settings(algorithm__preset=preset, eval__prompts=1, eval__save=0, run__checkpoint__every=16, **BLOCK)
    cost = predict_cost(chosen)
    for line in metrics(run.train_config(chosen).folder):
        assert line["policy/max_abs_log_ratio"] < 1e-5
        assert line["policy/skipped_updates"] == 0
        for part in ("rollout", "update"):
            spent, most = line[f"cost/{part}_evaluations"], getattr(cost, part)
            assert spent == most if getattr(cost, f"{part}_fixed") else spent <= most


WALKS = [  # steps, most commits of one, and whether every prompt takes so many
    ("low_confidence", 10, (10, 4, True)),
    # 6 where the prompt ends with a block or in its middle
    ({"name": "low_confidence", "steps": 6}, 12, (7, 2, False)),
    ({"name": "random", "region": {"block_length": 2}, "steps": 6}, 12, (7, 2, False)),
    ({"name": "low_confidence", "steps": 3}, 12, (4, 1, False)),
    ("threshold", 10, (10, 4, False)),
]


@pytest.mark.parametrize(("spec", "length", "expected"), WALKS)
def test_the_steps_of_a_decoder_are_the_most_of_any_prompt(spec, length, expected):
    walk = count_decoder_steps(build(spec, length, 2, block_size=4))
    assert (walk.steps, walk.commits, walk.fixed) == expected
    predictor = MaskPredictor(llama(), MASK, PAD, block_size=4)
    decoder, prompts = build(spec, length, 2, predictor), [torch.ones(1, 1 + i, dtype=torch.long) for i in range(4)]
    taken = [int(decode(predictor, prompt, decoder, [0]).steps) for prompt in prompts]
    assert max(taken) <= walk.steps
    assert spec == "threshold" or max(taken) == walk.steps
    assert min(taken) == walk.steps or not walk.fixed


@pytest.mark.parametrize(
    ("preset", "views"), [("just_grpo", 4), ("cj_grpo", 4), ("trace_rl", 1), ("gdpo", 3), ("ebpo", 16)]
)
def test_a_view_scores_all_blocks(settings, preset, views):
    assert plan(settings(algorithm__preset=preset, **BLOCK))["geometry"]["views"] == views


def test_the_doctor_finds_nothing_wrong(settings):
    chosen = settings(algorithm__preset="cj_grpo", algorithm__decoder__cache="prefix", **BLOCK)
    assert [check.name for check in examine(chosen) if not check.ok] == []


def test_an_export_says_how_its_model_attends(settings, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run.train_config(settings(model__lora={"rank": 2, "alpha": 4.0}, **BLOCK))
    assert main(["export", str(done.folder), "--out", "lora"]) == 0
    assert "attention='block', block_size=4" in (tmp_path / "lora" / "README.md").read_text()
    asked = ["sample", str(model), "--adapter", "lora", "--prompt", "bcd", "--seed", "0", "length=7"]
    assert main([*asked, "--out", "block", "attention=block", "block_size=4"]) == 0
    assert main([*asked, "--out", "none", "block_size=4"]) == 2


KNOWN = [
    ({"model_type": "llama"}, {}, None),
    ({"model_type": "llama"}, {"attention": "block", "block_size": 8}, 8),
    ({"model_type": "llada2_moe"}, {}, 32),
    ({"model_type": "llada2_moe"}, {"block_size": 16}, 16),
    ({"model_type": "sdar", "block_size": 4}, {}, 4),
    ({"model_type": "sdar"}, {"block_size": 8}, 8),
    ({"model_type": "Fast_dLLM_Qwen", "bd_size": 64}, {"attention": "block"}, 64),
    ({"model_type": "llama"}, {"attention": "block"}, r"model\.block_size: unknown for a llama"),
    ({"model_type": "llama"}, {"block_size": 8}, "a llama has full attention unless model.attention is block"),
    ({"model_type": "sdar"}, {}, r"model\.block_size: unknown for a sdar"),
    ({"model_type": "sdar", "block_size": 4}, {"attention": "full"}, "a sdar attends in blocks"),
    ({"model_type": "diffusion_gemma"}, {}, "a diffusion_gemma is not supported, its canvas holds random tokens"),
]


@pytest.mark.parametrize(("known", "written", "expected"), KNOWN)
def test_what_a_model_type_attends_to_is_known_or_asked_for(known, written, expected):
    if isinstance(expected, str):
        with pytest.raises(InputError, match=expected):
            find_block_size(known, **written)
    else:
        assert find_block_size(known, **written) == expected


@pytest.mark.parametrize("kind", ["sdar", "Fast_dLLM_Qwen"])
def test_released_block_models_are_qwens(kind, tmp_path):
    own = (qwen3() if kind == "sdar" else qwen()).float()
    own.resize_token_embeddings(101)
    own.save_pretrained(tmp_path)
    qwen_tokenizer(tmp_path, kind)
    written = json.loads((tmp_path / "config.json").read_text())
    written |= {"model_type": kind, "rope_theta": 10000.0, "block_size": 4, "bd_size": 4, "mask_token_id": 97}
    extra = "block_size" if kind == "Fast_dLLM_Qwen" else "bd_size"
    dropped = ("rope_parameters", "is_causal", "pad_token_id", "layer_types", extra)
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in written.items() if k not in dropped}))
    predictor, _ = load_predictor(str(tmp_path))
    assert (predictor.block_size, predictor.shift, predictor.mask_id) == (4, kind != "sdar", 97)
    ids = torch.tensor([[3, 1, 4, 1, 5, 97, 97]])
    number = torch.arange(7) // 4
    mask = torch.zeros(7, 7).masked_fill(number[:, None] < number, torch.finfo(torch.float32).min)
    expected = own(ids, attention_mask=mask[None, None]).logits[:, : -1 if predictor.shift else None]
    found = predictor.logits(ids)[:, 1 if predictor.shift else 0 :]
    torch.testing.assert_close(found[..., :97], expected[..., :97], rtol=0, atol=1e-5)


def test_a_model_is_loaded_with_its_blocks(model, tmp_path):
    assert load_predictor(str(model))[0].block_size is None
    assert load_predictor(str(model), attention="block", block_size=4)[0].block_size == 4
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llada2_moe"}))
    with pytest.raises(InputError, match="full is not what it was trained with"):
        load_predictor(str(tmp_path), attention="full")
