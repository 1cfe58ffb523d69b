"""Captured calls: the numbers of plain ones, whatever changes between them, or no graph and the reason."""

from pathlib import Path

import pytest
import tiny
import torch
from replayed import adapted, drift, policy_of, rollout
from runs import metrics
from taped import capture
from torch import nn

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.errors import InputError
from flowgrpo.flow import setup
from flowgrpo.flow.config import Model
from flowgrpo.flow.pipeline.networks import captured_calls
from flowgrpo.flow.pipeline.networks.captured_calls import CapturedCalls
from flowgrpo.flow.pipeline.networks.switches import checkpoint_gradients

SHAPES = str(Path(__file__).parents[5] / "configs/shapes.yaml")


def count_calls(module):
    """Return a list that grows with each call that a module computes."""
    calls, forward = [], module.forward

    def counted(*args, **kwargs):
        calls.append(torch.is_grad_enabled())
        return forward(*args, **kwargs)

    module.forward = counted
    return calls


def numbers(tree):
    edges = [edges for evaluation in tree.evaluations for edges in evaluation.trained]
    return torch.cat([torch.cat([each.log_prob.flatten(), *(x.flatten() for x in each.next_state)]) for each in edges])


@pytest.mark.parametrize("name", ["sd3_guided", "flux"])
def test_a_rollout_by_graphs_has_the_numbers_of_one_by_calls(name):
    policy, plain = policy_of(name), policy_of(name)
    adapted(policy), adapted(plain)
    (network,) = policy.modules.values()
    calls = count_calls(network)
    captured = CapturedCalls([network], capture)
    expected = numbers(rollout(plain))
    for _ in range(2):
        tree = rollout(policy)
        assert torch.equal(numbers(tree), expected)
    assert captured.on
    before = len(calls)
    tree = rollout(policy)
    assert len(calls) == before  # all of them replayed
    assert torch.equal(numbers(tree), expected)
    assert drift(policy, tree) == 0
    plain.evaluations = policy.evaluations = 0
    rollout(policy), rollout(plain)
    assert policy.evaluations == plain.evaluations > 0


class Network(nn.Module):
    """A network that does `act` in each call."""

    def __init__(self, act=lambda network, x: x):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("kept", torch.ones(4))
        self.act, self.calls = act, []

    def forward(self, x, scale=1.0, of=None):
        self.calls.append(1)
        return (self.second(self.act(self, self.first(x)).relu()) * scale,)


@torch.no_grad()
def values(network, count=6, **given):
    """Return the outputs of calls with other inputs each."""
    inputs = torch.randn(count, 3, 4, generator=torch.Generator().manual_seed(1))
    return torch.stack([network(x, **given)[0] for x in inputs])


def test_the_fourth_call_is_the_first_that_only_replays():
    network = Network()
    expected = values(network)
    CapturedCalls([network], capture)
    counts = []
    for x in torch.randn(5, 3, 4):
        network.calls.clear()
        with torch.no_grad():
            network(x)
        counts.append(len(network.calls))
    assert counts == [1, 3, 1, 0, 0]  # the second is made, looked at and captured
    assert torch.equal(values(network), expected)


def test_a_change_of_weights_layers_or_arguments_shows():
    network, plain = Network(), Network()
    captured = CapturedCalls([network], capture)
    other = [torch.randn_like(p) for p in network.parameters()]
    kept = [p.data for p in network.parameters()]

    def alike(**given):
        assert torch.equal(values(network, **given), values(plain, **given))

    def put(tensors, layers=(network, plain)):
        for each in layers:
            for p, value in zip(each.parameters(), tensors, strict=True):
                p.data = value

    alike()
    with torch.no_grad():
        for each in (network, plain):
            for p in each.parameters():
                p.mul_(1.5)  # as an optimizer does
    alike()
    put(other)  # as an average is swapped in
    alike()
    put(kept, [network])
    put([value.clone() for value in kept], [plain])
    calls = len(network.calls)
    alike()
    assert len(network.calls) == calls  # its graph is kept
    alike(scale=2.0)
    alike(scale=True)
    for each in (network, plain):
        each.second = each.first
    alike()
    x = torch.randn(3, 4)
    torch.testing.assert_close(network(x)[0], plain(x)[0])
    assert network(x)[0].requires_grad
    assert captured.on


def test_graphs_of_adapters_that_are_switched_off():
    policy, plain = policy_of("sd3"), policy_of("sd3")
    weights, expected = adapted(policy), adapted(plain)
    CapturedCalls(policy.modules.values(), capture)
    found = []
    for _ in range(3):
        found.append(numbers(rollout(policy)))
        with weights.reference(), expected.reference():
            assert torch.equal(numbers(rollout(policy)), numbers(rollout(plain)))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[2], numbers(rollout(plain)))


def asks(network, x):
    return x * (x.sum().item() > -1e9)


def counts(network, x):
    return x * len(network.calls)


def writes(network, x):
    network.kept.add_(1)
    return x * network.kept


def writes_out(network, x):
    torch.add(network.kept, 1, out=network.kept)
    return x * network.kept


def keeps(network, x):
    network.before, before = x, getattr(network, "before", x)
    return x + before


def leaves(network, x):
    return (x.to("meta").new_zeros(4, device="cpu") + x).to(x.dtype)


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (asks, "Network asks for a number, by aten._local_scalar_dense.default"),
        (counts, "Network has other values in its graph than in its calls"),
        (writes, "Network changes a tensor that it did not make, by aten.add_.Tensor"),
        (writes_out, "Network changes a tensor that it did not make, by aten.add.out"),
        (keeps, "Network keeps before of Network from call to call"),
        (leaves, "Network computes with a tensor that is not on cpu, by aten._to_copy.default"),
    ],
)
def test_a_network_that_has_no_graph_is_called(act, reason, caplog):
    network, plain = Network(act), Network(act)
    captured = CapturedCalls([network], capture)
    found = values(network)
    (warning,) = caplog.messages
    assert warning == f"model.cuda_graphs: calls are made without graphs from here on, because {reason}"
    assert not captured.on
    if act not in (counts, keeps):  # their trial is a call, too
        assert torch.equal(found, values(plain))


def test_an_argument_that_is_changed_has_no_graph(caplog):
    network = Network(lambda network, x: x)
    forward = network.forward
    network.forward = lambda x: forward(x.add_(1))
    CapturedCalls([network], capture)
    inputs = torch.zeros(5, 3, 4)
    with torch.no_grad():
        for x in inputs:
            network(x)
    assert torch.equal(inputs, torch.ones(5, 3, 4))
    assert "changes a tensor that it did not make, by aten.add_.Tensor" in caplog.text


@pytest.mark.parametrize("failing", ["the trial", "the capture"])
def test_memory_that_runs_out_for_a_graph_costs_the_graphs_only(failing, caplog):
    def runs_out(call):
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")  # as torch.cuda.graph

    def in_trial(network, x):
        if len(network.calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return x

    network = Network(in_trial) if failing == "the trial" else Network()
    CapturedCalls([network], capture if failing == "the trial" else runs_out)
    assert torch.equal(values(network), values(Network()))
    assert "Network cannot be captured (CUDA out of memory. Tried to allocate 2.00 GiB.)" in caplog.text


def test_an_argument_that_is_no_tensor_or_number_has_no_graph(caplog):
    network = Network()
    CapturedCalls([network], capture)
    assert torch.equal(values(network, of=object()), values(Network()))
    assert "because Network takes or returns an object of type object" in caplog.text


def test_further_kinds_of_calls_have_no_graphs(monkeypatch, caplog):
    monkeypatch.setattr(captured_calls, "GRAPHS", 2)
    network = Network()
    captured = CapturedCalls([network], capture)
    for scale in (1.0, 2.0, 3.0, 4.0):
        values(network, scale=scale)
    assert caplog.messages == ["model.cuda_graphs: 2 kinds of calls have graphs, the others are made without"]
    for scale, count in ((1.0, 0), (3.0, 6)):
        network.calls.clear()
        values(network, scale=scale)
        assert len(network.calls) == count
    assert captured.replays
    assert captured.give_up("it is tried")
    assert not captured.give_up("there are none")
    assert len(caplog.messages) == 2
    network.calls.clear()
    values(network)
    assert len(network.calls) == 6


def test_blocks_that_are_compiled_and_checkpointed_ask_for_no_random_state(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "get_rng_state", lambda: asked.append(1))
    policy = policy_of("sd3")
    checkpoint_gradients(policy.modules.values())
    network = policy.modules["transformer"]
    with torch.enable_grad():  # as compiled blocks compute
        network(**tiny.sd3_inputs(network))[0].requires_grad_().sum().backward()
    assert not asked


@pytest.mark.gpu
def test_a_real_graph_has_the_numbers_of_calls():
    network, plain = Network().cuda(), Network().cuda()
    captured = CapturedCalls([network])
    inputs = torch.randn(6, 3, 4, device="cuda")
    with torch.no_grad():
        assert all(torch.equal(network(x)[0], plain(x)[0]) for x in inputs)
    assert captured.replays


def test_a_network_compiled_as_a_whole_is_refused():
    network = Network()
    network._compiled_call_impl = network.forward
    with pytest.raises(
        InputError, match=r"^model.cuda_graphs: Network is compiled as a whole; set model.compile=false$"
    ):
        CapturedCalls([network], capture)


def test_a_machine_without_a_gpu_is_refused():
    with pytest.raises(
        InputError, match=r"^model.cuda_graphs: it needs a CUDA GPU, and this run is on cpu; set it to false$"
    ):
        setup.check_switches(Model(path="none", cuda_graphs=True), torch.device("cpu"))


def test_a_run_with_graphs_is_one_without(workplace, monkeypatch):
    """Rollouts by the adapters, evaluations by their average: all lines but for times and memory."""
    graphs = []
    monkeypatch.setattr(setup, "check_installed", lambda *given, **named: None)
    monkeypatch.setattr(captured_calls, "cuda_graphs", lambda: lambda call: graphs.append(1) or capture(call))
    small = ["run.processes=1", "run.trees=null", "train.iterations=2", "train.groups=2", "train.group_size=4"]
    small += ["train.micro_batch=4", "eval.prompts=4", "eval.save=0", "model.call.num_inference_steps=5"]
    made = []
    for word in ("false", "true"):
        chosen = [
            f"run.name=graphs-{word}",
            f"model.cuda_graphs={word}",
            "algorithm.preset=flow_grpo",
            "train.replay=always",
        ]
        assert main(["train", SHAPES, *small, *chosen]) == 0
        lines = metrics(workplace / "runs" / f"graphs-{word}", "train") + metrics(
            workplace / "runs" / f"graphs-{word}", "eval"
        )
        timed = ("time/", "memory/", "perf/")
        made.append([{key: value for key, value in line.items() if not key.startswith(timed)} for line in lines])
    assert made[0] == made[1]
    assert len(graphs) >= 2
    assert "without graphs" not in (workplace / "runs/graphs-true/log.txt").read_text()


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"run": {"sharding": "fsdp2"}}, r"calls that several processes make together; set run\.sharding=none"),
        ({"run": {"context_parallel": 2, "processes": 2}}, r"calls that .* together; set run\.context_parallel=1"),
        (
            {"model": {"lora": None}, "train": {"draft": {"precision": "int8"}}},
            r"each rollout computes with another copy by train\.draft\.precision; set train\.draft\.precision=null",
        ),
    ],
)
def test_what_graphs_cannot_do_is_refused(sections, said):
    model = {"path": "shapes", "cuda_graphs": True, **sections.get("model", {})}
    with pytest.raises(InputError, match=rf"^model\.cuda_graphs: {said}$"):
        config.validate({"rewards": [{"use": "shapes"}], **sections, "model": model})
