"""Adapters that a run starts from: in a network, as its reference, and in the file that the run keeps."""

import json

import peft
import pytest
import torch
from safetensors.torch import save_file

from flowgrpo.errors import InputError
from flowgrpo.schema.lora import Lora
from flowgrpo.schema.sections import Ema
from flowgrpo.training.lora import lora_files, lora_layers
from flowgrpo.training.lora.lora_layers import Index, Outline, names_in
from flowgrpo.training.weights import lora_adapters
from flowgrpo.training.weights.lora_adapters import Adapter, Matrices
from flowgrpo.training.weights.trained_weights import Weights


class Network(torch.nn.Module):
    """Two layers, the path of one the end of the other's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.proj = torch.nn.Linear(4, 4, bias=False)
        self.block = torch.nn.Sequential()
        self.block.add_module("proj", torch.nn.Linear(4, 4, bias=False))

    def forward(self, x):
        return self.block(self.proj(x))


def layer(rank=2, alpha=3.0, bias=None):
    generator = torch.Generator().manual_seed(rank)
    down, up = (torch.randn(shape, generator=generator) for shape in ((rank, 4), (4, rank)))
    return Matrices(down=down, up=up, bias=bias, alpha=alpha)


def read_back(folder, weights):
    """The adapters that a run keeps, by network."""
    lora_adapters.save(folder / lora_files.START, weights.begun)
    outlines = {name: Outline.of(Network()) for name in weights.modules}
    layers = {name: names_in(name, outline.layers) for name, outline in outlines.items()}
    parameters = {name: names_in(name, outline.parameters) for name, outline in outlines.items()}
    file = lora_files.read(str(folder / lora_files.START))
    return lora_layers.assign_adapters(file, Index(layers, parameters), outlines, "it")


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def test_each_layer_adds_alpha_over_rank_times_its_matrices():
    network, layers = Network(), {"proj": layer(2, 3.0), "block.proj": layer(3, 7.0)}
    first, second = (Network().proj.weight, Network().block.proj.weight)
    expected = X @ (first + 1.5 * layers["proj"].up @ layers["proj"].down).T
    expected = expected @ (second + 7 / 3 * layers["block.proj"].up @ layers["block.proj"].down).T
    weights = Weights({"net": network}, {"net": Adapter(layers)}, ema=Ema())
    torch.testing.assert_close(network(X), expected)
    assert sum(p.numel() for p in weights.parameters) == Adapter(layers).size == 2 * 4 * 2 + 2 * 4 * 3
    assert all(torch.equal(slow, p) for slow, p in zip(weights.ema, weights.parameters, strict=True))


@pytest.mark.parametrize("path", ["proj", "block.proj"])
def test_a_path_that_is_the_end_of_another_stays_alone(path):
    network = Network()
    config = Adapter({path: layer()}).inject(network)
    again = Network()
    peft.inject_adapter_in_model(config, again)  # what an export's configuration says
    for each in (network, again):
        assert [at for at, module in each.named_modules() if hasattr(module, "lora_A")] == [path]


def test_layers_that_share_a_tensor_are_trained_apart():
    shared = layer()
    weights = Weights({"net": Network()}, {"net": Adapter({"proj": shared, "block.proj": shared})})
    with torch.no_grad():
        weights.parameters[0].add_(1)
    assert torch.equal(weights.named["net.block.proj.lora_A.default.weight"], shared.down)


@pytest.mark.parametrize(("reference", "is_start"), [("fixed", True), ("base", False)])
def test_the_reference_is_the_start_or_the_base(reference, is_start):
    network = Network()
    weights = Weights({"net": network}, {"net": Adapter({"proj": layer()})}, reference=reference)
    with torch.no_grad():
        expected = network(X) if is_start else Network()(X)
        for p in weights.parameters:
            p.add_(0.1)
        with weights.reference():
            assert torch.equal(network(X), expected)
        assert not torch.equal(network(X), expected)


def test_a_half_precision_base_gets_the_files_numbers_in_float32():
    network = Network().to(torch.bfloat16)
    adapter = Adapter({"proj": layer()})
    weights = Weights({"net": network}, {"net": adapter})
    assert [p.dtype for p in weights.parameters] == [torch.float32] * 2
    assert torch.equal(weights.named["net.proj.lora_A.default.weight"], adapter.layers["proj"].down)


def test_what_a_run_keeps_reads_back_to_the_bit(tmp_path):
    layers = {"proj": layer(2, 3.0, torch.arange(4.0)), "block.proj": layer(3, 7.0, torch.ones(4))}
    weights = Weights({"net": Network()}, {"net": Adapter(layers, rslora=True)})
    found = read_back(tmp_path, weights)["net"]
    assert found.rslora
    for path, expected in layers.items():
        assert found.layers[path].alpha == expected.alpha
        assert all(torch.equal(getattr(found.layers[path], x), getattr(expected, x)) for x in ("down", "up", "bias"))
    assert list(tmp_path.iterdir()) == [tmp_path / lora_files.START]


def test_networks_that_scale_otherwise_read_back_as_they_were(tmp_path):
    networks = {"transformer": Network(), "transformer_2": Network()}
    begun = {name: Adapter({"proj": layer(4, 8.0)}, rslora=name == "transformer") for name in networks}
    weights = Weights(networks, begun)
    assert [network.proj.scaling["default"] for network in networks.values()] == [4.0, 2.0]
    found = read_back(tmp_path, weights)
    assert {name: each.rslora for name, each in found.items()} == {"transformer": True, "transformer_2": False}


def test_renamed_keeps_each_layers_rank_and_alpha():
    config = Adapter({"a.q": layer(2, 3.0), "a.k": layer(4, 3.0), "a.v": layer(2, 5.0)}).config()
    found = lora_adapters.rename_layers(config, {"a.q": "b.one", "a.k": "b.two", "a.v": "b.three"})
    assert sorted(found.target_modules) == ["b.one", "b.three", "b.two"]
    assert (found.r, found.lora_alpha) == (2, 3.0)
    assert lora_adapters.alpha_in({"alpha_pattern": found.alpha_pattern, "lora_alpha": 3.0}, "b.three", 2) == 5.0
    assert found.rank_pattern == {r"^b\.two": 4}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "needs the adapter_config.json that peft writes"),
        ({"peft_type": "LOHA"}, "is not peft's"),
        *(
            ({"peft_type": "LORA", **options}, r"^model\.lora\.path: \S+ has options that peft does not write \(")
            for options in (
                *({"lora_alpha": alpha} for alpha in ("8", True, -1)),
                *({"alpha_pattern": patterns} for patterns in ({"(": 1}, 3)),
            )
        ),
    ],
)
def test_a_file_of_peft_needs_its_configuration(tmp_path, config, said):
    tensors = {f"proj.{name}": tensor for name, tensor in layer().named()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    if config:
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=said):
        lora_layers.layers_of(lora_files.read(str(tmp_path)))


def test_a_lora_section_has_defaults_or_the_files_numbers():
    assert (Lora().rank, Lora().alpha, Lora().targets) == (16, 32, "auto")
    begun = Lora(path="a")
    assert (begun.rank, begun.alpha, begun.targets) == (None, None, None)
    assert Lora.model_validate(begun.model_dump()) == begun
    assert Lora(path="a", rank=4).rank == 4


@pytest.mark.parametrize("rslora", [False, True])
def test_what_is_merged_computes_what_the_adapter_does(rslora):
    shifts = {"block.proj.weight": torch.ones(4, 4)}
    adapter = Adapter({"proj": layer(2, 3.0), "block.proj": layer(3, 7.0)}, rslora, shifts)
    beside, within = Network().to(torch.bfloat16), Network().to(torch.bfloat16)
    beside.float()
    adapter.inject(beside)
    adapter.merge(within)
    assert {p.dtype for p in within.parameters()} == {torch.float32}  # bfloat16 would round the changes away
    torch.testing.assert_close(within(X), beside(X))
