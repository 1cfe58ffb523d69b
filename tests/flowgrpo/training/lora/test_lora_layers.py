"""What the tensors of a LoRA file mean: none is left out without a word."""

import pytest
import torch

from flowgrpo.errors import InputError
from flowgrpo.training.lora import lora_files
from flowgrpo.training.lora.lora_files import LoraFile
from flowgrpo.training.lora.lora_layers import (
    Index,
    Outline,
    Target,
    assign_adapters,
    layers_of,
    names_in,
    refuse_shifts_alone,
    shifts_of,
)

DOWN, UP = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 3.0]])


def pair(name, down=DOWN, up=UP):
    return {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}


def file(tensors, **options):
    return LoraFile(place="it", tensors=tensors, options={"": options} if options else {})


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.out = torch.nn.Linear(2, 1), torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 3)
        self.norm, self.table = torch.nn.LayerNorm(2), torch.nn.Parameter(torch.zeros(1, 2))


def put(tensors, **options):
    """The adapter of a network whose makers have q and k in one layer, and know its table as modulation."""
    outline = Outline.of(Network())
    fused = {"block.qk": Target("net", ("q", "k")), "block.swapped": Target("net", ("k",), True)}
    layers = {"net": fused | names_in("net", outline.layers)}
    parameters = {"net": {"block.modulation": Target("net", ("table",))} | names_in("net", outline.parameters)}
    return assign_adapters(file(tensors, **options), Index(layers, parameters), {"net": outline}, "this")["net"]


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"out.lora_mid.weight": DOWN}, "holds out.lora_mid.weight, which is no matrix of a LoRA"),
        ({"out.scale": DOWN}, "holds out.scale, which is no matrix of a LoRA"),
        ({"norm.alpha": torch.tensor(2.0)}, "holds norm.alpha, and no matrices that it scales"),
        ({"out.alpha": torch.tensor(0.0)}, "has an alpha of 0 for out"),
        ({"out.alpha": torch.tensor(-2.0)}, "has an alpha of -2 for out, it must be above 0"),
        ({"out.lora_A.weight": DOWN}, "has two adapters for out, out.lora_A.weight is of one of them"),
        ({"norm.diff": DOWN[0], "norm.w_norm": DOWN[0]}, "shifts norm.weight twice, norm.w_norm is one"),
        (pair("out", up=UP.int()), "holds out.lora_up.weight as int32"),
        ({"out.diff_b": torch.ones(2)}, r"has a bias of shape \[2\] for out, whose output is 3 wide"),
        ({"out.diff_b": torch.tensor(1.0)}, r"has a bias of shape \[\] for out, whose output is 3 wide"),
        ({"out.lora_B.bias": torch.ones(1)}, r"has a bias of shape \[1\] for out, whose output is 3 wide"),
        (pair("out", up=UP[..., None].repeat(1, 1, 3)), "has a second matrix for out that is no product"),
        ({"norm.diff": torch.tensor(1.0)}, "shifts norm.weight, and this has no such parameter"),
        ({"k.lora_down.weight": DOWN}, "has one matrix of the two for k"),
        (pair("net.out"), "has two adapters for out, net.out is one of them"),
        (pair("other"), "has an adapter for other, and this has no such layer"),
        ({"other.diff": DOWN}, "shifts other.weight, and this has no such parameter of that shape"),
        ({"norm.diff": torch.ones(3)}, "shifts norm.weight, and this has no such parameter of that shape"),
        ({"k.diff_b": torch.ones(2)}, "shifts k.bias, and this has no such parameter of that shape"),
    ],
)
def test_what_has_no_place_is_refused_by_its_name(tensors, said):
    with pytest.raises(InputError, match=f"^model.lora.path: it {said}"):
        put(pair("out") | tensors)


def written(shifts):
    return {path: shift.tolist() for path, shift in shifts.items()}


def test_shifts_are_of_weights_biases_and_parameters_of_their_own():
    shifts = {
        "norm.diff": torch.tensor([1.0, 2.0]),
        "norm.diff_b": torch.tensor([3.0, 4.0]),
        "q.diff_b": torch.tensor([5.0]),
        "block.diff_m": torch.tensor([[6.0, 7.0]]),
    }
    found = put(pair("out") | shifts)
    assert list(found.layers) == ["out"]
    expected = {"norm.weight": [1, 2], "norm.bias": [3, 4], "q.bias": [5], "table": [[6, 7]]}
    assert written(found.shifts) == expected


@pytest.mark.parametrize(
    "key", ["table.diff", "net.table.diff", "lora_unet_block_modulation.diff", "block.modulation.diff"]
)
def test_a_parameter_of_no_layer_may_be_named_by_itself(key):
    assert put(pair("out") | {key: torch.ones(1, 2)}).shifts["table"].tolist() == [[1, 1]]


def test_lycoris_names_norms_otherwise():
    found = put(pair("out") | {"lycoris_norm.w_norm": torch.ones(2), "lycoris_norm.b_norm": torch.zeros(2) + 2})
    assert written(found.shifts) == {"norm.weight": [1, 1], "norm.bias": [2, 2]}


@pytest.mark.parametrize(
    ("options", "scale"), [({}, 4 / 2), ({"use_rslora": True, "lora_alpha": 4}, 4 / 2**0.5), ({"lora_alpha": 6}, 6 / 2)]
)
def test_the_shift_of_a_bias_beside_matrices_is_what_they_add_to_it(options, scale):
    alpha = {} if options else {"out.alpha": torch.tensor(4.0)}
    found = put(pair("out") | {"out.diff_b": torch.tensor([1.0, 2.0, 3.0])} | alpha, **options)
    torch.testing.assert_close(scale * found.layers["out"].bias, torch.tensor([1.0, 2.0, 3.0]))
    assert not found.shifts


def change(matrices, rslora=False):
    return matrices.alpha / (matrices.rank**0.5 if rslora else matrices.rank) * matrices.up @ matrices.down


@pytest.mark.parametrize("rslora", [False, True])
def test_a_layer_in_parts_gives_each_its_rows_and_what_of_the_rank_acts_on_them(rslora):
    options = {"lora_alpha": 3, "use_rslora": rslora}
    found = put(pair("block.qk"), **options)
    whole = 3 / (2**0.5 if rslora else 2) * UP @ DOWN
    torch.testing.assert_close(change(found.layers["q"], rslora), whole[:1])
    torch.testing.assert_close(change(found.layers["k"], rslora), whole[1:])
    assert [found.layers[name].rank for name in "qk"] == [1, 2]  # the first row of UP has one number


def test_a_part_on_which_nothing_acts_has_no_adapter_unless_all_are_new():
    only = torch.tensor([[0.0, 0.0], [0.0, 1.0], [2.0, 3.0]])
    assert list(put(pair("block.qk", up=only)).layers) == ["k"]
    assert list(put(pair("block.qk", up=torch.zeros(3, 2))).layers) == ["q", "k"]


def test_halves_of_a_layer_that_are_in_the_other_order_change_places():
    up, bias = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([5.0, 6.0])
    found = put(pair("block.swapped", up=up) | {"block.swapped.diff_b": bias}).layers["k"]
    assert found.up.tolist() == [[3, 4], [1, 2]]
    assert found.bias.tolist() == [6, 5]


def test_shifts_of_zeros_are_left_out_with_a_warning(tmp_path):
    from safetensors.torch import save_file

    zeros = {"norm.diff": torch.zeros(2), "nothing.here.diff_b": torch.zeros(1)}
    save_file(pair("out") | zeros, tmp_path / "a.safetensors")
    with pytest.warns(UserWarning, match=r"has 2 shifts of zeros, norm\.diff first; left out"):
        found = lora_files.read(str(tmp_path / "a.safetensors"))
    assert list(layers_of(found)) == ["out"]
    assert shifts_of(found) == {}


def test_shifts_of_a_network_without_matrices_stay():
    outlines = {name: Outline.of(Network()) for name in ("one", "two")}
    layers = {name: names_in(name, each.layers) for name, each in outlines.items()}
    parameters = {name: names_in(name, each.parameters) for name, each in outlines.items()}
    tensors = pair("one.out") | {"two.norm.diff": torch.ones(2)}
    found = assign_adapters(file(tensors), Index(layers, parameters), outlines, "this")
    assert found["one"].layers.keys() == {"out"}
    assert (found["two"].layers, found["two"].shifts["norm.weight"].tolist()) == ({}, [1, 1])


def test_shifts_alone_are_nothing_to_train():
    with pytest.raises(InputError, match=r"^model.lora.path: it shifts norm.weight and has no matrices to train; set"):
        refuse_shifts_alone([put({"norm.diff": torch.ones(2)})])


def test_a_convolutions_second_matrix_may_be_written_as_one():
    down = torch.rand(2, 5, 3, 3)
    assert layers_of(file(pair("conv", down=down)))["conv"].up.shape == (3, 2, 1, 1)


def test_a_weight_that_two_layers_share_is_not_merged_into():
    network = Network()
    network.again = torch.nn.Linear(2, 3)
    network.again.weight = network.out.weight
    with pytest.raises(InputError, match=r"^model.merge: it adds to out.weight, whose weight is that of again.weight,"):
        put(pair("out")).merge(network)
