import gc

import pytest
import torch
import transformers
from torch import nn

from flowgrpo.data.tensor_maps import map_tensors
from flowgrpo.training.planning import meta_networks as networks
from flowgrpo.training.planning.meta_networks import AllocationCounter, MetaNetworks, build_on_meta, few_objects, size


@pytest.fixture(scope="module", autouse=True)
def _put_aside():
    """Phases collect garbage, which takes long among all that was ever imported."""
    with few_objects():
        yield


class Layers(nn.Module):
    """Three layers, each with its gain; the second output tells the mean of a mask."""

    def __init__(self, width=64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.register_buffer("gain", torch.full((width,), 2.0))

    def forward(self, x, mask=None):
        for layer in self.layers:
            x = layer(x).relu() * self.gain
        if mask is not None:
            x = x[mask]
        return {"out": x, "seen": [x.mean()]}


def empty_copy(network, networks):
    made = build_on_meta(network, torch.float32).requires_grad_(True)
    networks.empty(made)
    return made


def test_keys_and_values_of_blocks_that_are_not_run_are_counted():
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=6, num_attention_heads=2
    )
    peaks, runs = [], []
    for run_all in (True, False):
        networks = MetaNetworks()
        made = build_on_meta(lambda: transformers.LlamaModel(config), torch.float32)
        for layer in made.layers:
            layer.self_attn.register_forward_hook(lambda *_: runs.append(1))
        networks.empty(made, run_all=run_all, reads_once=True)
        with torch.no_grad(), networks.phase() as counted:
            made(torch.ones(1, 64, dtype=torch.long), output_hidden_states=True)
            peaks.append(counted.peak)
    assert len(runs) == 6 + 2
    assert peaks[1] == pytest.approx(peaks[0], rel=0.05)
    keys_and_values = 6 * 2 * 64 * 16 * 4
    assert peaks[0] > 2 * keys_and_values


def test_live_counts_what_is_allocated_and_freed():
    live = AllocationCounter()
    with live:
        a = torch.zeros(256)
        b = a + 1
        view = b[:128]
        assert live.now == 2048
        del a
        c = torch.zeros(64)
        assert live.now == 1024 + 256
        del b
        assert live.now == 1024 + 256  # the view holds it
        del view, c
    assert (live.now, live.peak) == (0, 2048)


def test_a_network_without_numbers_allocates_what_a_real_one_does():
    networks, live, x = MetaNetworks(), AllocationCounter(), torch.randn(8, 16, 64)
    real, made = Layers(), empty_copy(Layers, networks)
    for tensor in (*real.parameters(), *real.buffers()):
        live.ignore(tensor)
    with live:
        real(x)["out"].square().mean().backward()
    with networks.phase() as counted:
        made(x)["out"].square().mean().backward()
        peak = counted.peak
    assert peak == pytest.approx(live.peak, rel=0.05)
    assert made.layers[0].weight.grad.shape == (64, 64)
    assert peak > 3 * x.nbytes


def test_outputs_are_real_zeros_of_the_same_shape_and_the_backward_runs_once():
    networks = MetaNetworks()
    made, x = empty_copy(Layers, networks), torch.randn(2, 3, 64)
    out = made(x)
    assert type(out["out"]) is torch.Tensor
    assert torch.equal(out["out"], torch.zeros(2, 3, 64))
    assert float(out["seen"][0].detach()) == 0
    before = networks.live.now
    out["out"].sum().backward()
    del out
    gc.collect()
    assert networks.live.now < before + size(made)  # the graph is gone, the gradients are there
    assert all(p.grad is not None for p in made.parameters())


def test_real_masks_choose_as_many_rows_as_they_do():
    made = empty_copy(Layers, MetaNetworks())
    mask = torch.tensor([[True, False, True], [False, False, True]])
    assert made(torch.randn(2, 3, 64), mask)["out"].shape == (3, 64)


def test_a_repeated_call_is_not_run_again_and_keeps_as_much():
    networks = MetaNetworks()
    made, x = empty_copy(Layers, networks), torch.randn(4, 16, 64)
    calls = []
    made.layers[0].register_forward_hook(lambda *_: calls.append(1))
    with networks.phase() as live:
        first = made(x)
        once = live.now
        again = made(x)
        assert live.now == 2 * once > 0
        assert len(calls) == 1
        (first["out"] + again["out"]).sum().backward()
    with networks.phase() as live, torch.no_grad():
        outs = [made(x)["out"] for _ in range(3)]
        assert live.now == 0
        assert len(calls) == 2
    assert all(torch.equal(out, torch.zeros(4, 16, 64)) for out in outs)


def test_a_number_that_does_not_exist_is_not_made_up():
    class Asks(nn.Module):
        def forward(self, x):
            return x if float(x.sum()) > 1 else -x

    with pytest.raises(NotImplementedError, match="numbers that do not exist is read"):
        empty_copy(Asks, MetaNetworks())(torch.randn(2, 3, 4))


def test_built_networks_have_the_type_asked_for_and_no_numbers():
    made = build_on_meta(Layers, torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in made.parameters())
    assert made.gain.dtype == torch.bfloat16
    assert size(made) == 2 * (3 * (64 * 64 + 64) + 64)


def test_mapped_reaches_tensors_inside_what_networks_return():
    class Distribution:
        def __init__(self):
            self.mean, self.name = torch.ones(2), "normal"

    value = {"a": (torch.ones(1), [torch.ones(2)]), "b": Distribution(), "c": 3}
    doubled = map_tensors(lambda x: 2 * x, value)
    assert float(doubled["a"][0]) == 2
    assert doubled["a"][1][0].tolist() == [2, 2]
    assert doubled["b"].mean.tolist() == [2, 2]
    assert value["b"].mean.tolist() == [1, 1]
    assert doubled["c"] == 3


class Positions(torch.nn.Module):
    """Two tables of products of positions, one of them large; and one whose size its numbers say."""

    def __init__(self, count):
        super().__init__()
        positions = torch.arange(count, dtype=torch.float64)
        self.register_buffer("pairs", torch.outer(positions, positions).sin().float())
        self.register_buffer("odd", (torch.arange(2 * networks.BROADCAST) % 2).nonzero())


def test_a_large_table_has_no_numbers_and_a_small_one_has_its_own():
    large, small = (build_on_meta(lambda count=count: Positions(count), torch.bfloat16) for count in (4097, 64))
    assert large.pairs.is_meta
    assert (large.pairs.shape, large.pairs.dtype) == ((4097, 4097), torch.bfloat16)
    assert torch.equal(small.pairs, Positions(64).pairs.bfloat16())
    for made in (large, small):
        assert len(made.odd) == networks.BROADCAST
    assert size(large) - size(small) == 2 * (4097**2 - 64**2)


def test_a_network_that_computes_with_its_large_table_is_built_all_the_same():
    class Placed(nn.Module):
        def __init__(self):
            super().__init__()
            table = torch.outer(torch.arange(4200.0), torch.arange(4100.0))
            assert table.numel() > networks.TABLE
            self.register_buffer("places", torch.cat([table, torch.zeros(1, 4100)]))

    assert build_on_meta(Placed, torch.float32).places.shape == (4201, 4100)


def test_objects_that_were_put_aside_stay_so_when_more_were(monkeypatch):
    monkeypatch.setattr(gc, "get_freeze_count", gc.count_frozen)

    def searched(x):
        return any(x is y for y in gc.get_objects())  # which leaves out what is put aside

    gc.unfreeze()
    first = [None]
    assert searched(first)
    with few_objects():
        assert not searched(first)
        with few_objects():
            assert not searched(first)
        assert not searched(first)
    assert searched(first)
    assert gc.get_freeze_count() == 0
    gc.freeze()
