"""Layers in low precision that stand in a network's blocks for a while: what computes, what stays, and what is refused."""

import copy
from types import SimpleNamespace
from typing import get_args

import pytest
import tiny
import torch
from low_layers import put_layers
from torch._dynamo.backends.debugging import aot_eager

from flowgrpo import config
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.networks.compiled_blocks import CompiledBlocks
from flowgrpo.training.weights import low_precision_copies
from flowgrpo.training.weights.low_precision_copies import LowPrecision, Precision, check_device, size
from flowgrpo.training.weights.low_precision_layers import EightBitLinear
from flowgrpo.training.weights.trained_weights import Weights, lora_config

WORDS = get_args(Precision)
SIZE = 64


class Block(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.to_q = torch.nn.Linear(size, size)

    def forward(self, x):
        return torch.tanh(self.to_q(x)) + x


class Blocks(torch.nn.Module):
    """Two blocks of a linear layer and one before them, which is in no block."""

    def __init__(self, size=SIZE):
        super().__init__()
        self.config = SimpleNamespace()
        self.start = torch.nn.Linear(size, size)
        self.blocks = torch.nn.ModuleList(Block(size) for _ in "12")

    def forward(self, x):
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return x


def network(size=SIZE):
    torch.manual_seed(0)
    return Blocks(size).requires_grad_(False)


def adapted(module):
    """A network with adapters that are not 0."""
    weights = Weights({"blocks": module}, lora_config(4, 8.0, ["to_q"], {"blocks": module}))
    with torch.no_grad():
        for p in weights.parameters:
            p.normal_(std=0.1)
    return weights


X = torch.randn(3, 5, SIZE, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("word", WORDS)
def test_what_computes_is_the_copy_and_what_stays_is_the_network(word):
    module = network()
    layers = [block.to_q for block in module.blocks]
    with torch.no_grad():
        whole = module(X)
        with LowPrecision([module], word, frozen=True).computing():
            low = module(X)
            assert not any(block.to_q is layer for block, layer in zip(module.blocks, layers, strict=True))
        assert torch.equal(module(X), whole)
    assert all(block.to_q is layer for block, layer in zip(module.blocks, layers, strict=True))
    assert 0 < (low - whole).norm() < 0.1 * whole.norm()
    put_layers(module, word)
    with torch.no_grad():
        assert torch.equal(module(X), low)


def test_bfloat16_multiplies_in_it_and_returns_what_came_in():
    module = network()
    layer = module.blocks[0].to_q
    by_hand = (X.bfloat16() @ layer.weight.bfloat16().T).float() + layer.bias
    with torch.no_grad(), LowPrecision([module], "bfloat16", frozen=True).computing():
        copied = module.blocks[0].to_q
        assert torch.equal(copied(X), by_hand)
        assert copied.weight.nbytes == size({"blocks.0.to_q.weight": (SIZE, SIZE)}, 4, "bfloat16") == 2 * SIZE**2
    assert module.blocks[0].to_q is layer


@pytest.mark.parametrize("frozen", [True, False])
def test_copies_that_are_kept_are_made_once_and_gone_behind_the_context(frozen):
    """Of layers that change; those of frozen ones stay as ever."""
    copies, seen = LowPrecision([network()], "int8", frozen=frozen), []
    for _ in range(2):
        with copies.keep():
            for _ in range(2):
                with copies.computing():
                    seen.append(copies._copies[0])
    assert seen[0] is seen[1]
    assert seen[2] is seen[3]
    assert (seen[0] is seen[2]) == frozen
    assert (copies._copies is not None) == frozen


@pytest.mark.parametrize("word", WORDS)
def test_adapters_act_with_the_values_that_they_have(word):
    """On copies made before: as on a base that is quantised itself, and of swapped values those."""
    module = network()
    weights = adapted(module)
    copies = LowPrecision([module], word, frozen=True)
    with torch.no_grad(), copies.computing():
        module(X)
    by_hand = network()
    put_layers(by_hand, word)
    like = adapted(by_hand)
    for values in ([p.detach().clone() for p in weights.parameters], [2 * p.detach() for p in weights.parameters]):
        like.put(values)
        with torch.no_grad(), weights.swap(values), copies.computing():
            assert torch.equal(module(X), by_hand(X))


def outputs(module, copies):
    """What a network computes by its copies, and by those that would be made of it now."""
    now = copy.deepcopy(module)
    put_layers(now, "int8")
    with torch.no_grad(), copies.computing():
        return module(X), now(X)


@pytest.mark.parametrize("frozen", [True, False])
def test_copies_of_frozen_layers_are_made_once_and_of_others_each_time(frozen):
    module = network()
    copies, weight = LowPrecision([module], "int8", frozen=frozen), module.blocks[0].to_q.weight
    assert torch.equal(*outputs(module, copies))
    weight.mul_(3.0)
    assert torch.equal(*outputs(module, copies)) == (not frozen)


def test_a_bias_that_learns_is_no_copy():
    module = network()
    copies = LowPrecision([module], "int8", frozen=True)
    for added in (0.0, 1.0):
        module.blocks[1].to_q.bias.add_(added)
        assert torch.equal(*outputs(module, copies))


def test_the_network_is_put_back_when_something_fails():
    module = network()
    with torch.no_grad():
        whole = module(X)
    with pytest.raises(ZeroDivisionError), LowPrecision([module], "int8", frozen=True).computing():
        raise ZeroDivisionError
    assert torch.equal(module(X), whole)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_row_knows_its_neighbours_and_every_layout_computes(word, dtype):
    module = network().to(dtype)
    layer = low_precision_copies._copy(module.start, word)
    x = X.to(dtype)
    with torch.no_grad():
        together = layer(x)
        assert together.dtype == dtype
        for row, alone in zip(together, x, strict=True):
            torch.testing.assert_close(layer(alone[None])[0], row, rtol=1e-2, atol=1e-2)
        assert layer(x[:, :2]).shape == (3, 2, SIZE)
        assert layer(x[0, 0]).shape == (SIZE,)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("columns", [64, 320])
def test_the_size_is_that_of_what_the_copies_keep(word, columns):
    own = torch.nn.Linear(columns, 192).to(torch.bfloat16)
    layer = low_precision_copies._copy(own, word)
    shapes = {"blocks.0.to_q.weight": (192, columns), "blocks.0.to_q.bias": (192,), "start.weight": (192, columns)}
    assert size(shapes, 2, word) == layer.codes.nbytes + layer.scale.nbytes < own.weight.nbytes
    assert size(shapes, 2, None) == 0


def test_layers_that_cannot_be_copied_are_one_sentence():
    said = r"nf4 takes blocks of 64 weights, blocks\.0\.to_q has rows of 48; take int8"
    with pytest.raises(InputError, match=rf"train\.draft\.precision: {said}"):
        LowPrecision([Blocks(48)], "nf4", frozen=True)
    alone = torch.nn.Linear(4, 4)
    alone.config = SimpleNamespace()
    said = "Linear has no linear layers in repeated blocks, set it to null"
    with pytest.raises(InputError, match=rf"train\.draft\.precision: {said}"):
        LowPrecision([alone], "int8", frozen=True)
    said = (
        "fp8 takes layers with inputs and outputs in multiples of 16, and Blocks has none in its blocks; set it to null"
    )
    with pytest.raises(InputError, match=rf"train\.draft\.precision: {said}"):
        LowPrecision([Blocks(24)], "fp8", frozen=True)


def test_a_layer_whose_sizes_eight_bits_do_not_take_stays_as_it_is():
    module = network()
    module.blocks[0].to_q = torch.nn.Linear(SIZE, 24).requires_grad_(False)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    for word in ("int8", "fp8"):
        copies = LowPrecision([module], word, frozen=True)
        assert [parent for parent, _ in copies._places] == [module.blocks[1]]
        assert size(shapes, 4, word) == copies.to_come == SIZE**2 + 4 * SIZE


def test_a_device_that_cannot_multiply_is_refused_before_the_model_loads(monkeypatch):
    def cannot(*_, **__):
        raise RuntimeError("only for GPUs of another kind")

    monkeypatch.setattr(torch, "_scaled_mm", cannot)
    check_device(drafting("int8"), torch.device("cpu"))
    said = r"train\.draft\.precision: a device of type cpu does not multiply in fp8; take int8$"
    with pytest.raises(InputError, match=said):
        check_device(drafting("fp8"), torch.device("cpu"))


def drafting(word, **model):
    return config.validate({"model": {"path": "shapes", **model}, "train": {"draft": {"precision": word}}})


def test_a_quantised_base_is_drafted_with_as_it_is_and_all_others_with_copies():
    said = r"the base is quantised already, by model\.quantise=int8, .* one of the two"
    with pytest.raises(InputError, match=rf"train\.draft\.precision: .*{said}"):
        drafting("int8", quantise="int8")
    for word in WORDS:
        assert drafting(word, dtype="bfloat16").train.draft.precision == word
        assert drafting(word, lora=None, dtype="bfloat16").train.draft.precision == word


def test_a_network_trained_whole_under_autocast_computes_in_its_type():
    """Its weights are float32; the copies' product is in bfloat16, as that of the layers."""
    module = network()
    copies = LowPrecision([module], "int8", frozen=False)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), copies.computing():
        assert module.blocks[0].to_q(X).dtype == torch.bfloat16


def test_the_layers_of_a_pipeline_s_network_are_found_under_its_adapters():
    transformer = tiny.sd3().transformer
    Weights({"transformer": transformer}, lora_config(2, 4.0, "auto", {"transformer": transformer}))
    with LowPrecision([transformer], "int8", frozen=True).computing():
        paths = {path for path, m in transformer.named_modules() if isinstance(m, EightBitLinear)}
        left = {path for path, m in transformer.named_modules() if type(m) is torch.nn.Linear}
    assert "transformer_blocks.0.attn.to_q.base_layer" in paths
    assert "transformer_blocks.1.ff.net.2" in paths
    assert not any(path.startswith("transformer_blocks") for path in left)


@pytest.mark.parametrize("word", ["int8", "fp8"])
def test_compiled_blocks_compute_with_the_layers_that_are_there(word):
    module = network()
    adapted(module)
    copies, graphs = LowPrecision([module], word, frozen=True), []

    @torch.no_grad()
    def both():
        whole = module(X)
        with copies.computing():
            return whole, module(X)

    plain = both()

    def backend(graph, inputs):  # traces a backward pass as Inductor does, and computes as eager
        graphs.append(graph)
        return aot_eager(graph, inputs)

    CompiledBlocks([module], backend)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(both(), plain, strict=True))
    compiled = len(graphs)
    both()
    assert len(graphs) == compiled > 0
    assert not torch.equal(*plain)
