"""Memory and operations that are planned without numbers, beside what the same models take with them."""

import gc
import json

import pytest
import torch
from released import released
from torch.utils.flop_counter import FlopCounterMode

from flowgrpo import config
from flowgrpo.errors import InputError
from flowgrpo.mdlm import setup
from flowgrpo.mdlm.decoding.decode import decode
from flowgrpo.mdlm.methods.likelihoods.answers import Answers
from flowgrpo.mdlm.methods.likelihoods.estimate import Call, log_probs
from flowgrpo.mdlm.methods.likelihoods.masked_views import Views
from flowgrpo.mdlm.models import gradient_checkpointing
from flowgrpo.mdlm.planning import memory_trace
from flowgrpo.mdlm.planning.decoder_steps import count_decoder_steps, training_decoder
from flowgrpo.mdlm.planning.memory_trace import trial
from flowgrpo.training.planning.allocation_counter import AllocationCounter, Peaks

pytestmark = pytest.mark.usefixtures("few_objects")

PROMPT, LENGTH = 8, 32
ONE_LAYER = {
    "llada": {"n_layers": 1},
    "dream": {"num_hidden_layers": 1},
    "sdar": {"num_hidden_layers": 1},
    "llada2": {},
}


@pytest.fixture
def no_update(monkeypatch):
    """A trial of decoders alone."""
    monkeypatch.setattr(memory_trace, "_measure_update", lambda *_: (Peaks(), 0, 0))


@pytest.fixture
def no_decoding(monkeypatch):
    """A trial of updates alone."""
    monkeypatch.setattr(memory_trace, "_measure_decoding", lambda *_, **__: (Peaks(), 0))


VOCABULARY = 4096
GAIN = {"credit": "step_gain", "baseline": "group_mean", "objective": {"name": "token_ratio", "clip_range": 0.2}}


def settings(folder, decoder=None, *, axes=None, **model):
    written = {"path": str(folder), "length": LENGTH, "lora": {"rank": 2, "alpha": 4}, **model}
    chosen = {"kind": "mdlm", "model": written, "prompts": {"train": "gsm8k:train", "eval": "gsm8k:test"}}
    algorithm = {**(axes or {}), **({"decoder": decoder} if decoder else {})}
    return config.validate({**chosen, "rewards": [{"use": "gsm8k"}], "algorithm": algorithm})


def view_of(predictor):
    """A function that scores one view of an answer."""
    scored = torch.ones(1, LENGTH, dtype=torch.bool)
    hidden = torch.nn.functional.pad(scored, (PROMPT, 0))
    answers = Answers(
        ids=torch.full((1, PROMPT + LENGTH), 3),
        attention_mask=torch.ones_like(hidden),
        scored=scored,
        addresses=[()],
        block_size=predictor.block_size,
    )
    views = Views(hidden[None], scored[None].float(), torch.ones(1))
    return lambda: log_probs(predictor, answers, views, Call(torch.tensor([0]), torch.tensor([0]))).sum()


def counted(call):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call()
    return counter.get_total_flops()


@pytest.mark.usefixtures("no_decoding")
@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        ("llada", False),
        ("sdar", True),
        *(pytest.param(*each, marks=pytest.mark.zoo) for each in (("llada", True), ("sdar", False))),
        *(pytest.param("dream", checkpointing, marks=pytest.mark.zoo) for checkpointing in (False, True)),
    ],
)
def test_what_is_planned_of_a_view_is_what_it_allocates_and_computes(name, checkpointing, tmp_path):
    """With its backward pass, where gradients are there already."""
    chosen = settings(released(name, tmp_path), gradient_checkpointing=checkpointing)
    planned = trial(chosen, PROMPT)
    policy, weights = setup.policy_and_weights(chosen, torch.device("cpu"))
    view, live = view_of(policy.predictor), AllocationCounter()
    assert planned.update_operations == counted(view)
    for tensor in (*policy.predictor.model.parameters(), *policy.predictor.model.buffers()):
        live.ignore(tensor)
    for p in weights.parameters:
        p.grad = torch.zeros_like(p)
    gc.collect()
    with live:
        view().backward()
    found = planned.update_checkpointed if checkpointing else planned.update
    assert found.of(1) == pytest.approx(live.peak, rel=0.15)


@pytest.mark.usefixtures("no_decoding")
def test_checkpointing_that_a_model_has_not_is_refused(tmp_path, monkeypatch):
    released("llada", tmp_path)
    monkeypatch.setattr(gradient_checkpointing, "GradientCheckpointingLayer", type(None))
    with pytest.raises(InputError, match="does not support it, set it to false"):
        trial(settings(tmp_path, gradient_checkpointing=True), PROMPT)
    assert trial(settings(tmp_path), PROMPT).update_checkpointed is None


BLOCKS = {"steps": 8, "region": {"block_length": 8}}
SIZES = {"sdar": (8, 12), "llada2": (28, 8)}  # tokens of the prompt and of the answer: several blocks of each model


@pytest.mark.usefixtures("no_update")
@pytest.mark.parametrize(
    ("name", "decoder", "apart"),
    [
        pytest.param("llada", BLOCKS, 0, marks=pytest.mark.zoo),
        ("llada", {**BLOCKS, "cfg_scale": 1.0}, 0),
        ("dream", BLOCKS, 0),
        ("dream", {**BLOCKS, "cache": "dual"}, 0.05),  # which feeds the column before a block, too
        ("dream", {**BLOCKS, "cache": "prefix"}, 0.05),
        ("sdar", {}, 0.1),  # each block sees more than the one before: a mean of the first and the last
        ("sdar", {"cache": "prefix"}, 0.1),
        ("llada2", {}, 0.1),
    ],
)
def test_what_is_planned_of_a_decode_is_what_it_computes(name, decoder, apart, tmp_path):
    given, length = SIZES.get(name, (PROMPT, LENGTH))
    chosen = settings(released(name, tmp_path, **ONE_LAYER[name]), decoder, length=length)
    policy, _ = setup.policy_and_weights(chosen, torch.device("cpu"))
    built = training_decoder(chosen, predictor=policy.predictor)
    prompt = torch.full((1, given), 5)
    real = counted(lambda: decode(policy.predictor, prompt, built, [("seed", 0)]))
    steps = count_decoder_steps(training_decoder(chosen)).steps
    assert trial(chosen, given).decode_operations * steps == pytest.approx(real, rel=apart)


@pytest.mark.usefixtures("no_update")
@pytest.mark.parametrize("guided", [False, True])
def test_predictions_of_whole_answers_are_planned_with_all_their_logits(tmp_path, guided):
    chosen = {**BLOCKS, "cfg_scale": float(guided)}
    released("dream", tmp_path, **ONE_LAYER["dream"], vocab_size=VOCABULARY)
    plain, gained = (trial(settings(tmp_path, chosen, axes=axes), PROMPT) for axes in (None, GAIN))
    policy, _ = setup.policy_and_weights(settings(tmp_path, chosen, axes=GAIN), torch.device("cpu"))
    built = training_decoder(settings(tmp_path, chosen), predictor=policy.predictor)
    prompt = torch.full((1, PROMPT), 5)
    real = counted(lambda: decode(policy.predictor, prompt, built, [("seed", 0)], drafts=True))
    assert gained.decode_operations * 8 == real > plain.decode_operations * 8
    live = AllocationCounter()
    for tensor in (*policy.predictor.model.parameters(), *policy.predictor.model.buffers()):
        live.ignore(tensor)
    gc.collect()
    with live, torch.no_grad():
        decode(policy.predictor, prompt, built, [("seed", 0)], drafts=True)
    assert gained.decode.of(1) == pytest.approx(live.peak, rel=0.15)
    assert gained.decode.of(1) > 2 * plain.decode.of(1)


@pytest.mark.usefixtures("no_update")
def test_held_out_answers_are_planned_without_predictions(tmp_path):
    released("dream", tmp_path, **ONE_LAYER["dream"])
    plain, gained = (trial(settings(tmp_path, axes=axes), PROMPT) for axes in (None, GAIN))
    assert plain.evaluate is None  # the decoder of the training
    assert gained.evaluate is not None
    assert gained.evaluate.of(1) == plain.decode.of(1)


def decoded(folder, **decoder):
    return trial(settings(folder, {"region": {"block_length": 16}} | decoder), PROMPT)


@pytest.mark.usefixtures("no_update")
def test_a_decoder_is_counted_with_its_branches_and_its_cache(tmp_path):
    released("dream", tmp_path, **ONE_LAYER["dream"])
    plain, guided, kept = decoded(tmp_path), decoded(tmp_path, cfg_scale=1.0), decoded(tmp_path, cache="dual")
    assert guided.decode.of(1) > 1.7 * plain.decode.of(1)
    written = json.loads((tmp_path / "config.json").read_text())
    width = written["hidden_size"] // written["num_attention_heads"] * written["num_key_value_heads"]
    keys = 2 * 4 * written["num_hidden_layers"] * width * (PROMPT + LENGTH)
    assert kept.decode.of(1) >= plain.decode.of(1) + keys // 2
    assert plain.evaluate is None or plain.evaluate.of(1) > 0


@pytest.mark.usefixtures("no_update")
def test_a_cache_that_grows_from_block_to_block_is_counted_with_the_prompt_and_at_the_end(tmp_path):
    released("sdar", tmp_path, **ONE_LAYER["sdar"])
    plain, kept = decoded(tmp_path, region=None), decoded(tmp_path, region=None, cache="prefix")
    assert 0 < kept.decode.of(1) < 3 * plain.decode.of(1)
    assert kept.decode.of(8) > 7 * kept.decode.of(1)


@pytest.mark.usefixtures("no_update")
def test_a_cache_that_other_branches_wait_for_is_counted(tmp_path):
    released("sdar", tmp_path, **ONE_LAYER["sdar"])
    written = json.loads((tmp_path / "config.json").read_text())
    finished = PROMPT + LENGTH - 2 * written["block_size"]  # tokens before the last two blocks, which run again
    keys = 2 * 4 * written["num_hidden_layers"] * written["head_dim"] * written["num_key_value_heads"] * finished
    tree = {"tree": {"name": "branch", "factor": 2, "splits": [0.25, 0.5]}}
    chain, grown = (trial(settings(tmp_path, {"cache": "prefix"}, axes=axes), PROMPT) for axes in (None, tree))
    assert grown.decode.of(1) - chain.decode.of(1) == pytest.approx(2 * keys, rel=0.05)
    assert grown.evaluate is not None
