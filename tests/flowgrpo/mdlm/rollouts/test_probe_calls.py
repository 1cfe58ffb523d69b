"""A run of texts finds its batches as one of pictures does, and halves them where they do not fit."""

import json

import pytest
import torch
from in_batches import AUTO, SAID
from in_turn import after_first_step
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from flowgrpo.commands.runs import train as run
from flowgrpo.mdlm import doctor
from flowgrpo.mdlm.planning import memory_budget, plan
from flowgrpo.mdlm.policy import TextPolicy
from flowgrpo.training.checkpoints import checkpoint
from flowgrpo.training.fitting import batch_probing
from flowgrpo.training.run.out_of_memory_error import OutOfMemory

pytestmark = pytest.mark.usefixtures("counting_clock")


@pytest.fixture
def short(monkeypatch):
    """The most rows that the model takes, with a gradient and without."""
    most, real = {True: 1000, False: 1000}, LlamaForCausalLM.forward

    def forward(self, ids, *arguments, **options):
        if len(ids) > most[torch.is_grad_enabled()]:
            raise torch.OutOfMemoryError(SAID)
        return real(self, ids, *arguments, **options)

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    return most


def numbers(done):
    kept = [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in done.metrics]
    return kept, load_file(checkpoint.find(done.folder / "checkpoints") / "weights.safetensors")


def same(one, other):
    (lines, weights), (others, theirs) = numbers(one), numbers(other)
    assert lines == others
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in weights.items())


def held(done):
    return json.loads((done.folder / "batches.json").read_text())["held"]


@pytest.mark.parametrize(
    "preset",
    ["diffu_grpo", "co_grpo", *(pytest.param(name, marks=pytest.mark.zoo) for name in ("trace_rl", "cj_grpo"))],
)
def test_a_run_has_the_numbers_of_one_with_the_found_sizes_written_out(settings, short, preset):
    short |= {True: 4, False: 8}
    chosen = {"algorithm__preset": preset, "train__iterations": 1}
    done = run.train_config(settings(run__name="auto", **chosen, **AUTO))
    assert held(done) == [{"step": 0, "micro_batch": 4, "rollout_batch": 8, "why": "found"}]
    written = {"train__micro_batch": 4, "train__rollout_batch": 8}
    same(done, run.train_config(settings(run__name="written", **chosen, **written)))


def test_a_resume_goes_on_with_what_was_found(settings, short, monkeypatch):
    short |= {True: 4, False: 8}
    whole = run.train_config(settings(run__name="whole", **AUTO))
    after_first_step(whole.folder.parent, "whole", "half")
    short |= {True: 1000, False: 1000}
    monkeypatch.setattr(batch_probing.Prober, "fits", lambda *arguments: pytest.fail("it probes"))
    same(whole, run.train_config(settings(run__name="half", run__resume=True, **AUTO)))


def test_a_call_without_memory_is_made_again_in_halves(settings, short, monkeypatch):
    from flowgrpo.mdlm.trainer import TextWing

    real = TextWing.rollout

    def rollout(self, iteration, groups):
        short.update(dict.fromkeys(short, 1000 if iteration == 0 else 5))
        return real(self, iteration, groups)

    monkeypatch.setattr(TextWing, "rollout", rollout)
    options = {"algorithm__objective__kl__beta": 0.0, "train__passes": 1, "train__updates": 1}
    done = run.train_config(settings(run__name="short", **options, **AUTO))
    sizes = [(each["step"], each["micro_batch"], each["rollout_batch"]) for each in held(done)]
    assert sizes == [(0, 32, 32), *((2, 32, most) for most in (16, 8, 4)), *((2, most, 4) for most in (16, 8, 4))]
    short.update(dict.fromkeys(short, 1000))
    monkeypatch.setattr(TextWing, "rollout", real)
    lines, weights = numbers(run.train_config(settings(run__name="plain", train__micro_batch=32, **options)))
    found, tensors = numbers(done)
    counts = ("cost/model_evaluations", "cost/update_evaluations", "policy/updates")
    assert [[line.get(key) for key in counts] for line in found] == [
        [line.get(key) for key in counts] for line in lines
    ]
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-3, atol=1e-4)


def test_a_run_that_cannot_be_helped_says_what_to_set(settings, short, monkeypatch):
    """Within an optimizer step nothing can be made again; the size that was found is halved in what is said."""

    def step(*arguments, **options):
        raise torch.OutOfMemoryError(SAID)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(run.RanOutOfMemory, match=r"out of memory in the update phase") as raised:
        run.train_config(settings(model__gradient_checkpointing=True, **AUTO))
    assert isinstance(raised.value.__cause__, OutOfMemory)
    assert "train.micro_batch=8" in str(raised.value)


def test_a_plan_and_a_doctor_count_with_the_most_that_is_tried(settings):
    """4 groups of 8 in 2 parts are 16 answers a part."""
    auto, written = (plan.plan(settings(**own)) for own in (AUTO, {"train__micro_batch": 16}))
    assert auto["geometry"].pop("found") == ["micro_batch", "rollout_batch"]
    assert written["geometry"].pop("found") == []
    assert {k: v for k, v in auto.items() if k != "config"} == {k: v for k, v in written.items() if k != "config"}
    assert all(check.ok for check in doctor.examine(settings(**AUTO)))


def test_with_a_gpu_a_plan_counts_with_the_most_that_fits(settings):
    found = memory_budget.fit(settings(**AUTO), 24 * 2**30)
    assert found["found"] == {"train.micro_batch": 16, "train.rollout_batch": 16}
    assert found["fits"]


def test_an_evaluation_by_another_decoder_has_to_fit_too(settings, short, monkeypatch):
    """Guided calls have two branches in one, so that four answers are the most of eight."""
    short |= {True: 4, False: 8}
    decoder = {"name": "low_confidence", "steps": 3}
    for name, guided, rows in (("alike", {}, 8), ("guided", {"cfg_scale": 1.0}, 4)):
        evaluation = {"every": 1, "prompts": 2, "save": 0, "decoder": {**decoder, **guided}}
        options = {"algorithm__decoder": decoder, "eval": evaluation, "train__iterations": 1}
        (found,) = held(run.train_config(settings(run__name=name, **options, **AUTO)))
        assert found["rollout_batch"] == rows


def test_rollouts_are_tried_with_the_predictions_that_they_record(settings, monkeypatch):
    tried, real = [], TextPolicy.generate

    def generate(self, texts, decoder, seeds, micro_batch, **options):
        tried.append((seeds[0][0], len(texts), options.get("drafts", False)))
        return real(self, texts, decoder, seeds, micro_batch, **options)

    monkeypatch.setattr(TextPolicy, "generate", generate)
    gains = {"algorithm__preset": "cj_grpo", "algorithm__credit": "step_gain", "algorithm__baseline": "group_mean"}
    evaluation = {"every": 4, "prompts": 2, "save": 0, "decoder": {"name": "low_confidence", "steps": 2}}
    run.train_config(settings(**gains, eval=evaluation, train__iterations=1, **AUTO))
    probed = {(count, drafts) for name, count, drafts in tried if name == "probe" and count > 1}
    assert {count for count, drafts in probed if drafts} == {count for count, drafts in probed if not drafts} > set()
