"""Activations in host memory: the same numbers to the bit, a copy of each storage, and no weight among them."""

import pytest
import torch
from conftest import copy_run
from cut_back import cut_back
from predictors import MASK, PAD, llama
from replayed import policy_of, trained
from runs import weights

from flowgrpo.commands.runs import train as run
from flowgrpo.flow.pipeline.networks import switches
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from flowgrpo.mdlm.models.gradient_checkpointing import checkpoint_gradients
from flowgrpo.training.fitting.saved_tensor_meter import SavedTensorMeter
from flowgrpo.training.weights.offload_activations import OffloadedTensors, offload_activations

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [MASK, 7, 1, MASK, 2, 8, MASK, 8]])


def test_a_graph_keeps_copies_and_the_weights_themselves():
    """tanh saves its output y, and has the gradient 1 - y^2; a linear layer without a gradient saves its weight."""
    x = torch.tensor([0.5, -1.0], requires_grad=True)
    with OffloadedTensors([]) as away:
        y = x.tanh()
        assert away.copied == 8
    wanted = 1 - y.detach() ** 2
    total = y.sum()
    y.data.zero_()
    torch.testing.assert_close(torch.autograd.grad(total, x)[0], wanted)

    layer = torch.nn.Linear(2, 2, bias=False).requires_grad_(False)
    with OffloadedTensors(layer.parameters()) as away:
        total = layer(x).sum()
        assert away.copied == 0
    layer.weight.data.fill_(3.0)
    assert torch.autograd.grad(total, x)[0].tolist() == [6.0, 6.0]


def test_views_share_the_copy_of_their_storage_and_changed_content_has_its_own():
    x = torch.randn(4, 6, requires_grad=True)
    with OffloadedTensors([]) as away:
        whole = x * 2
        views = [whole[:, :3], whole.t(), whole.unflatten(1, (2, 3)).conj(), whole[:1].expand(8, 6)]
        squares = [view**2 for view in views]
        assert away.copied == whole.nbytes
    plain = [(x * 2)[:, :3] ** 2, (x * 2).t() ** 2, (x * 2).unflatten(1, (2, 3)) ** 2, (x * 2)[:1].expand(8, 6) ** 2]
    for ours, theirs in zip(squares, plain, strict=True):
        one, other = (torch.autograd.grad(out.sum(), x, retain_graph=True)[0] for out in (ours, theirs))
        assert torch.equal(one, other)

    with OffloadedTensors([]) as away, torch.no_grad():
        state = torch.ones(3)
    with away:
        first = x[0, :3] * state
        state.add_(1)
        second = x[0, :3] * state
    assert torch.autograd.grad((first + second).sum(), x)[0][0].tolist() == [3.0, 3.0, 3.0, 0, 0, 0]


def test_views_that_are_back_at_a_time_share_their_storage_which_is_let_go_with_them(monkeypatch):
    """A product saves both factors; its gradient is 2 x times the other."""
    moved, to = [], torch.Tensor.to

    def another_device(tensor, *args, **kwargs):
        moved.append(tensor.nbytes)
        return to(tensor, *args, **kwargs).clone()

    x = torch.randn(4, 6, requires_grad=True)
    with OffloadedTensors([]) as away:
        left, right = (x * 2).chunk(2, dim=1)
        total = (left * right).sum()
    assert away.copied == 4 * 6 * 4
    monkeypatch.setattr(torch.Tensor, "to", another_device)
    for times in (1, 2):
        (found,) = torch.autograd.grad(total, x, retain_graph=True)
        assert moved == [4 * 6 * 4] * times
        torch.testing.assert_close(found, 4 * x.detach().roll(3, 1))


def same_gradients(total, inputs, weights=()):
    """Compare the gradients of a sum with those of offloaded activations; return how many bytes were copied."""
    found = []
    for context in (torch.enable_grad(), OffloadedTensors(weights)):
        with context:
            value = total()
        found.append(torch.autograd.grad(value, inputs))
    assert all(torch.equal(*each) for each in zip(*found, strict=True))
    return context.copied


def test_memory_that_is_used_again_is_copied_again():
    x = torch.linspace(0.1, 0.9, 1000, requires_grad=True)

    def far():
        y = x
        for _ in range(50):
            y = (y.sin() * 1.5).clone()
            torch.empty(1000).fill_(7.0)
        return y.sum()

    assert same_gradients(far, [x]) >= 50 * 4000


def test_complex_numbers_keep_their_sign():
    x = torch.randn(5, dtype=torch.complex64, requires_grad=True)
    same_gradients(lambda: (x * x.conj().sin()).abs().sum(), [x])


def test_a_compiled_module_computes_the_same():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4), torch.nn.Tanh())
    compiled, x = torch.compile(layers, backend="aot_eager"), torch.randn(3, 4)
    weights = list(layers.parameters())
    assert same_gradients(lambda: compiled(x).sum(), weights, weights) > 0


@pytest.mark.parametrize(
    ("name", "checkpointed"),
    [
        ("sd3_guided", False),
        ("flux", True),
        pytest.param("sd3_guided", True, marks=pytest.mark.zoo),
        pytest.param("flux", False, marks=pytest.mark.zoo),
    ],
)
def test_a_pipeline_computes_the_same_with_and_without_checkpointing(name, checkpointed):
    policy = policy_of(name)
    if checkpointed:
        switches.checkpoint_gradients(policy.modules.values())
    offload_activations(policy.pipe.transformer)
    (plain, _, gradients), (numbers, drift, others) = trained(policy_of(name)), trained(policy)
    assert all(torch.equal(a, b) for a, b in zip((*plain, *gradients), (*numbers, *others), strict=True))
    assert drift == 0.0


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_language_model_computes_the_same_and_keeps_nothing_on_its_device(checkpointed):
    found, copied = [], []
    for asked in (False, True):
        model = llama(4)
        if checkpointed:
            checkpoint_gradients(model)
        if asked:
            forward = model.forward
            model.forward = lambda *a, own=forward, **k: copied.append(1) or own(*a, **k)
            offload_activations(model)
        predictor = MaskPredictor(model, MASK, PAD)
        with SavedTensorMeter(model.parameters()) as meter:
            out = predictor.logits(IDS)[..., :MASK]
        found.append((meter.now, out, torch.autograd.grad(out.square().mean(), list(model.parameters()))))
    (kept, plain, gradients), (left, out, others) = found
    assert copied
    assert left < 0.1 * kept
    assert torch.equal(plain, out)
    assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))


def test_a_run_goes_on_with_it_as_without_it(workplace, finished):
    copy_run(finished, workplace)
    cut_back(workplace / "runs" / "t", 1)
    run.train("tiny.yaml", {"run.resume": True, "model.offload_activations": True})
    plain, away = (weights(folder / "runs" / "t", 2) for folder in (finished, workplace))
    torch.testing.assert_close(away, plain, rtol=0, atol=0)
