"""A quantised base: what its layers compute and keep, what is refused, and what it weighs."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import tiny
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from flowgrpo import config
from flowgrpo.errors import InputError
from flowgrpo.training.fitting.saved_tensor_meter import SavedTensorMeter
from flowgrpo.training.weights.quantisation import FORMS, NORMAL_FLOAT, QuantisedLinear, quantise, refuse_dynamic, size
from flowgrpo.training.weights.trained_weights import Weights, lora_config

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Half a step of the form as a part of the largest weight that shares a scale.
ERROR = {"int8": 0.5 / 127, "nf4": max(b - a for a, b in pairwise(NORMAL_FLOAT)) / 2}


def linear(dtype=torch.float32, rows=48, columns=128):
    torch.manual_seed(0)
    return torch.nn.Linear(columns, rows).to(dtype).requires_grad_(False)


class Blocks(torch.nn.Module):
    """A network with a repeated block, as a transformer has them."""

    def __init__(self, layer):
        super().__init__()
        self.config = SimpleNamespace()
        self.blocks = torch.nn.ModuleList([torch.nn.ModuleDict({"to_q": layer})])


def llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_a_layer_is_the_linear_layer_of_what_it_keeps(form, dtype):
    own = linear(dtype)
    layer = QuantisedLinear(own, form)
    x = torch.randn(2, 5, 128, dtype=dtype, requires_grad=True)
    y = layer(x)
    gradient = torch.randn_like(y)
    wanted = torch.nn.functional.linear(x, layer.weight, own.bias)
    assert torch.equal(y, wanted)
    assert torch.equal(*(torch.autograd.grad(out, x, gradient)[0] for out in (y, wanted)))
    assert layer.weight.dtype == dtype
    off = (layer.weight.float() - own.weight.float()).abs().max() / own.weight.float().abs().max()
    assert off <= ERROR[form] + torch.finfo(dtype).eps
    before = layer.codes.clone()
    assert torch.equal(layer.to(torch.bfloat16).codes, before)  # a cast of the network does not reach the codes
    assert layer.weight.dtype == torch.bfloat16


def test_codes_are_the_nearest_and_the_largest_weight_is_kept():
    own = linear(columns=64, rows=2)
    own.weight[0] = torch.tensor(NORMAL_FLOAT).repeat(4) * 3
    own.weight[1] = torch.arange(64) * 4.0 - 127
    assert torch.equal(QuantisedLinear(own, "nf4").weight[0], own.weight[0])
    assert torch.equal(QuantisedLinear(own, "int8").weight[1], own.weight[1])
    own.weight[0] = 0
    for form in FORMS:
        assert torch.equal(QuantisedLinear(own, form).weight[0], torch.zeros(64))


@pytest.mark.parametrize("form", FORMS)
def test_graphs_keep_no_weight(form):
    layers = torch.nn.Sequential(*[QuantisedLinear(linear(torch.bfloat16, 128), form) for _ in range(4)])
    x = torch.randn(2, 128, dtype=torch.bfloat16, requires_grad=True)
    with SavedTensorMeter([*layers.parameters(), *layers.buffers()]) as meter:
        y = layers(x)
        assert meter.now == 0
    y.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_adapters_learn_on_it_and_their_reference_is_the_quantised_base(form):
    model = llama()
    ids = torch.arange(8)[None]
    whole = model(ids).logits
    quantise(model, form)
    base = model(ids).logits
    assert not torch.equal(base, whole)
    kinds = {type(m) for path, m in model.named_modules() if isinstance(m, torch.nn.Linear) and path != "lm_head"}
    assert kinds == {QuantisedLinear}
    assert type(model.lm_head) is torch.nn.Linear
    weights = Weights({"model": model}, lora_config(2, 4, "auto", {"model": model}), reference="fixed")
    for p in weights.parameters:
        torch.nn.init.normal_(p, std=0.2)
    out = model(ids).logits
    assert not torch.equal(out, base)
    out.square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in weights.parameters)
    with torch.no_grad(), weights.reference():
        assert torch.equal(model(ids).logits, base)


@pytest.mark.parametrize("form", FORMS)
def test_the_size_is_that_of_what_is_kept(form):
    model = llama().to(torch.bfloat16)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert size(shapes, 2, None) == sum(p.nbytes for p in model.parameters())
    quantise(model, form)
    assert size(shapes, 2, form) == sum(p.nbytes for p in model.parameters())
    assert model.dtype == torch.bfloat16


def not_finite():
    own = linear()
    own.weight[0, 0] = torch.nan
    return own


@pytest.mark.parametrize(
    ("layer", "form", "said"),
    [
        (
            lambda: linear(columns=32),
            "nf4",
            r"nf4 takes blocks of 64 weights, blocks\.0\.to_q has rows of 32; take int8$",
        ),
        (not_finite, "int8", r"the weights of blocks\.0\.to_q are not finite$"),
        (torch.nn.Tanh, "int8", "Blocks has no linear layers in repeated blocks, set it to null$"),
    ],
)
def test_what_cannot_be_quantised_is_refused(layer, form, said):
    with pytest.raises(InputError, match=rf"^model\.quantise: {said}"):
        quantise(Blocks(layer()), form)


def test_what_is_quantised_in_its_files_is_refused():
    there = Blocks(linear())
    refuse_dynamic(there)
    there.config.quantization_config = {"quant_type": {"_type": "Int8DynamicActivationInt8WeightConfig"}}
    with pytest.raises(InputError, match="^model.quantise: the model's weights are quantised already in its files"):
        quantise(there, "int8")
    with pytest.raises(InputError, match="^model.path: its files quantise activations as they come, where gradients"):
        refuse_dynamic(there)


@pytest.mark.parametrize("kind", [{"model": {"path": "shapes"}}, {"kind": "mdlm", "model": {"path": "digits"}}])
def test_a_config_without_adapters_or_with_another_word_is_refused(kind):
    asked = {**kind, "model": {**kind["model"], "lora": None, "quantise": "int8"}}
    with pytest.raises(InputError, match=r"model\.quantise: only a frozen base can be quantised, and model\.lora=null"):
        config.validate(asked)
    asked["model"] = {**kind["model"], "quantise": "int8_dynamic"}
    with pytest.raises(InputError, match=r"model\.quantise: .*int8"):
        config.validate(asked)
    assert config.validate(kind).model.quantise is None


def test_the_layers_before_and_after_the_blocks_stay():
    transformer = tiny.sd3().transformer
    quantise(transformer, "int8")
    kept = {path for path, m in transformer.named_modules() if type(m) is torch.nn.Linear}
    assert kept
    assert all(not path.startswith("transformer_blocks.") for path in kept)
    assert isinstance(transformer.transformer_blocks[0].attn.to_out[0], QuantisedLinear)
