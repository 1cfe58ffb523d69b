"""Operations that are planned without numbers, beside torch's count of the same models with numbers."""

import pytest
import torch
from released import released
from torch.utils.flop_counter import FlopCounterMode

from flowgrpo import config
from flowgrpo.mdlm import setup
from flowgrpo.mdlm.decoding.decode import decode
from flowgrpo.mdlm.methods.likelihoods.answers import Answers
from flowgrpo.mdlm.methods.likelihoods.estimate import Call, log_probs
from flowgrpo.mdlm.methods.likelihoods.masked_views import Views
from flowgrpo.mdlm.planning import memory_trace
from flowgrpo.mdlm.planning.memory_trace import trial
from flowgrpo.mdlm.planning.plan import training_decoder, walked
from flowgrpo.training.planning.allocation_counter import Peaks

pytestmark = pytest.mark.usefixtures("few_objects")

PROMPT, LENGTH = 8, 32
ONE_LAYER = {
    "llada": {"n_layers": 1},
    "dream": {"num_hidden_layers": 1},
    "sdar": {"num_hidden_layers": 1},
    "llada2": {},
}


def settings(folder, length=LENGTH, **decoder):
    model = {"path": str(folder), "length": length, "lora": {"rank": 2, "alpha": 4}}
    prompts = {"train": "gsm8k:train", "eval": "gsm8k:test"}
    algorithm = {"decoder": decoder} if decoder else {}
    written = {"kind": "mdlm", "model": model, "prompts": prompts, "algorithm": algorithm}
    return config.validated(written | {"rewards": [{"use": "gsm8k"}]})


def counted(call):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call()
    return counter.get_total_flops()


BLOCKS = {"steps": 8, "region": {"block_length": 8}}
SIZES = {"sdar": (8, 16), "llada2": (24, 16)}  # tokens of the prompt and of the answer: several blocks of each model


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
def test_what_is_planned_of_a_decode_is_what_it_computes(name, decoder, apart, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_trace, "_learnt", lambda *_: (Peaks(), 0, 0))  # updates have a test of their own
    given, length = SIZES.get(name, (PROMPT, LENGTH))
    chosen = settings(released(name, tmp_path, **ONE_LAYER[name]), length, **decoder)
    policy, _ = setup.policy_and_weights(chosen, torch.device("cpu"))
    built = training_decoder(chosen, predictor=policy.predictor)
    prompt = torch.full((1, given), 5)
    real = counted(lambda: decode(policy.predictor, prompt, built, [("seed", 0)]))
    steps = walked(training_decoder(chosen)).steps
    assert trial(chosen, given).decode_operations * steps == pytest.approx(real, rel=apart)


@pytest.mark.parametrize("name", ["llada", pytest.param("dream", marks=pytest.mark.zoo), "sdar"])
def test_what_is_planned_of_a_view_is_what_it_computes(name, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_trace, "_decoded", lambda *_: (Peaks(), 0))
    chosen = settings(released(name, tmp_path, **ONE_LAYER[name]))
    policy, _ = setup.policy_and_weights(chosen, torch.device("cpu"))
    scored = torch.ones(1, LENGTH, dtype=torch.bool)
    hidden = torch.nn.functional.pad(scored, (PROMPT, 0))
    answers = Answers(
        ids=torch.full((1, PROMPT + LENGTH), 3),
        attention_mask=torch.ones_like(hidden),
        scored=scored,
        addresses=[()],
        block_size=policy.predictor.block_size,
    )
    views = Views(hidden[None], scored[None].float(), torch.ones(1))
    call = Call(torch.tensor([0]), torch.tensor([0]))
    assert trial(chosen, PROMPT).update_operations == counted(lambda: log_probs(policy.predictor, answers, views, call))
