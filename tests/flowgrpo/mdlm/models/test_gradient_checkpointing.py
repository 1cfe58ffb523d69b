import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from predictors import MASK, PAD, VOCAB, llama
from transformers import BertConfig, BertForMaskedLM

from flowgrpo.commands.runs import train as run
from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.network.kv_cache import BlockCache
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from flowgrpo.mdlm.models.gradient_checkpointing import checkpoint_gradients
from flowgrpo.training.fitting.saved_tensor_meter import SavedTensorMeter

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [MASK, 7, 1, MASK, 2, 8, MASK, 8]]).repeat(4, 4)


def bert():
    """With dropout, which is off here."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
    return BertForMaskedLM(BertConfig(vocab_size=VOCAB, pad_token_id=PAD, initializer_range=0.4, **sizes)).eval()


def adapted():
    """Whose embedding and first layers ask for no gradient."""
    model = llama(4).requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["layers.2.mlp.up_proj"], init_lora_weights=False), model)
    return model


@pytest.mark.parametrize(("make", "share"), [(lambda: llama(4), 0.3), (bert, 0.3), (adapted, 0.5)])
def test_gradients_are_the_same_and_less_is_kept(make, share):
    found = []
    for asked in (False, True):
        model = make()
        if asked:
            checkpoint_gradients(model)
        predictor = MaskPredictor(model, MASK, PAD)
        with SavedTensorMeter(model.parameters()) as meter:
            out = predictor.logits(IDS)[..., :MASK]
            kept = meter.now
        out.square().mean().backward()
        with torch.no_grad():
            assert torch.equal(predictor.logits(IDS)[..., :MASK], out)
        found.append((kept, out, [p.grad for p in model.parameters() if p.grad is not None]))
    (all_of_it, plain, gradients), (kept, out, again) = found
    assert kept < share * all_of_it
    assert torch.equal(plain, out)
    assert gradients
    assert all(torch.equal(one, other) for one, other in zip(gradients, again, strict=True))


def test_a_decoder_keeps_its_cache_and_its_hidden_states():
    plain, model = llama(), llama()
    checkpoint_gradients(model)
    found = []
    for network in (plain, model):
        predictor = MaskPredictor(network, MASK, PAD)
        with torch.no_grad():
            seen = torch.ones_like(IDS, dtype=torch.bool)
            cache = BlockCache(predictor, "dual", "decoder.cache")
            cached = [cache.logits(IDS, seen, torch.arange(len(IDS)), start=8, stop=12) for _ in range(2)]
            found.append([*cached, *predictor.logits_and_hidden(IDS, None, start=0, stop=None, layers=2)[1]])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_model_without_marked_layers_is_refused():
    said = r"^model\.gradient_checkpointing: Linear does not support it, set it to false$"
    with pytest.raises(InputError, match=said):
        checkpoint_gradients(torch.nn.Linear(2, 2))


def test_a_run_trains_the_same_weights(settings):
    choices = {"algorithm__preset": "gdpo", "model__lora": {"rank": 2, "alpha": 4}, "train__iterations": 1}
    found, switches = [], ("gradient_checkpointing", "offload_activations")
    for count in range(3):
        done = run.train_config(
            settings(run__name=f"by{count}", **{f"model__{key}": True for key in switches[:count]}, **choices)
        )
        calls = [line["cost/model_evaluations"] for line in done.metrics]
        found.append((calls, [p.tolist() for p in done.policy.predictor.model.parameters()]))
    assert found[0] == found[1] == found[2]
