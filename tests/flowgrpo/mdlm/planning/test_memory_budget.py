"""`flowgrpo plan CONFIG --gpu-memory GIB` on language models, beside what they allocate with numbers."""

import gc
import json

import pytest
import torch
from released import released

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.errors import InputError
from flowgrpo.mdlm import setup
from flowgrpo.mdlm.methods.likelihoods.answers import Answers
from flowgrpo.mdlm.methods.likelihoods.estimate import Call, log_probs
from flowgrpo.mdlm.methods.likelihoods.masked_views import Views
from flowgrpo.mdlm.models import gradient_checkpointing
from flowgrpo.mdlm.planning import memory_trace
from flowgrpo.mdlm.planning.memory_trace import trial
from flowgrpo.training.planning.allocation_counter import AllocationCounter, Peaks

pytestmark = pytest.mark.usefixtures("few_objects")

PROMPT, LENGTH = 8, 32


def settings(folder, **model):
    written = {"path": str(folder), "length": LENGTH, "lora": {"rank": 2, "alpha": 4}, **model}
    prompts = {"train": "gsm8k:train", "eval": "gsm8k:test"}
    return config.validated({"kind": "mdlm", "model": written, "prompts": prompts, "rewards": [{"use": "gsm8k"}]})


def really(chosen):
    """The peak of one view of an answer and its backward pass, where gradients are there already."""
    policy, weights = setup.policy_and_weights(chosen, torch.device("cpu"))
    scored = torch.ones(1, LENGTH, dtype=torch.bool)
    hidden = torch.nn.functional.pad(scored, (PROMPT, 0))
    ids = torch.full((1, PROMPT + LENGTH), 3)
    answers = Answers(
        ids=ids,
        attention_mask=torch.ones_like(hidden),
        scored=scored,
        addresses=[()],
        block_size=policy.predictor.block_size,
    )
    views = Views(hidden[None], scored[None].float(), torch.ones(1))
    live = AllocationCounter()
    for tensor in (*policy.predictor.model.parameters(), *policy.predictor.model.buffers()):
        live.ignore(tensor)
    for p in weights.parameters:
        p.grad = torch.zeros_like(p)
    gc.collect()
    with live:
        call = Call(torch.tensor([0]), torch.tensor([0]))
        log_probs(policy.predictor, answers, views, call).sum().backward()
        return live.peak


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["llada", pytest.param("dream", marks=pytest.mark.zoo), "sdar"])
def test_what_is_planned_is_what_is_allocated(name, checkpointing, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_trace, "_decoded", lambda *_: (Peaks(), 0))  # decoders have tests of their own
    released(name, tmp_path)
    chosen = settings(tmp_path, gradient_checkpointing=checkpointing)
    planned = trial(chosen, PROMPT)
    found = planned.update_checkpointed if checkpointing else planned.update
    assert found.of(1) == pytest.approx(really(chosen), rel=0.15)


def test_plan_says_whether_a_run_fits(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "small.yaml", "--gpu-memory", "2"]) == 2
    released("llada", tmp_path / "small", n_layers=1)
    (tmp_path / "small.yaml").write_text("kind: mdlm\nmodel: {path: small, length: 8}\nrewards: [{use: solved}]\n")
    capsys.readouterr()
    assert main(["plan", "small.yaml", "--gpu-memory", "2", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["gpu"]
    assert found["fits"]
    assert [phase["phase"] for phase in found["phases"]] == ["rollout", "update"]
    most = found["largest"]["train.rollout_batch"]
    assert main(["plan", "small.yaml", f"train.rollout_batch={most + 1}", "--gpu-memory", "2"]) == 0
    assert f"by: train.rollout_batch={most}" in capsys.readouterr().out


@pytest.fixture
def no_update(monkeypatch):
    """A trial of decoders alone."""
    monkeypatch.setattr(memory_trace, "_learnt", lambda *_: (Peaks(), 0, 0))


def decoded(folder, **decoder):
    chosen = settings(folder)
    algorithm = {"decoder": {"region": {"block_length": 16}} | decoder}
    return trial(config.validated({**chosen.model_dump(), "algorithm": algorithm}), PROMPT)


def test_a_decoder_is_counted_with_its_branches_and_its_cache(tmp_path, no_update):
    released("dream", tmp_path, num_hidden_layers=1)
    plain, guided, kept = decoded(tmp_path), decoded(tmp_path, cfg_scale=1.0), decoded(tmp_path, cache="dual")
    assert guided.decode.of(1) > 1.7 * plain.decode.of(1)
    written = json.loads((tmp_path / "config.json").read_text())
    width = written["hidden_size"] // written["num_attention_heads"] * written["num_key_value_heads"]
    keys = 2 * 4 * written["num_hidden_layers"] * width * (PROMPT + LENGTH)
    assert kept.decode.of(1) >= plain.decode.of(1) + keys // 2
    assert plain.evaluate is None or plain.evaluate.of(1) > 0


def test_checkpointing_that_a_model_has_not_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_trace, "_decoded", lambda *_: (Peaks(), 0))
    released("llada", tmp_path)
    monkeypatch.setattr(gradient_checkpointing, "GradientCheckpointingLayer", type(None))
    with pytest.raises(InputError, match="does not support it, set it to false"):
        trial(settings(tmp_path, gradient_checkpointing=True), PROMPT)
    assert trial(settings(tmp_path), PROMPT).update_checkpointed is None


def test_a_cache_that_grows_from_block_to_block_is_counted_with_the_prompt_and_at_the_end(tmp_path, no_update):
    released("sdar", tmp_path, num_hidden_layers=1)
    plain, kept = decoded(tmp_path, region=None), decoded(tmp_path, region=None, cache="prefix")
    assert 0 < kept.decode.of(1) < 3 * plain.decode.of(1)
    assert kept.decode.of(8) > 7 * kept.decode.of(1)
