"""The counter of evaluations with a backward pass: by when the gradient arrives, and once for each call."""

from dataclasses import dataclass

import pytest
import torch
from transformers.modeling_outputs import MaskedLMOutput

from flowgrpo.training.distributed import fsdp_lockstep
from flowgrpo.training.weights.backward_counter import BackwardCounter


@dataclass
class Plain:
    """The output of a model that has no class of a library."""

    logits: torch.Tensor


class Form(torch.nn.Module):
    """A network whose output has one of the forms of a library."""

    def __init__(self, form):
        super().__init__()
        self.weight, self.form = torch.nn.Parameter(torch.ones(2)), form

    def forward(self, x):
        return self.form(x * self.weight)


# Of each form: what the network returns, and its tensor in that.
FORMS = {
    "tensor": (lambda x: x, lambda out: out),
    "tuple": (lambda x: (x,), lambda out: out[0]),
    "library": (lambda x: MaskedLMOutput(logits=x, hidden_states=(x.detach(),)), lambda out: out.logits),
    "plain": (Plain, lambda out: out.logits),
}


@pytest.mark.parametrize(("form", "tensor_of"), FORMS.values(), ids=FORMS)
def test_rows_count_when_the_gradient_reaches_them(form, tensor_of):
    network = Form(form)
    counter = BackwardCounter([network])

    def evaluate(rows):
        return tensor_of(network(x=torch.ones(rows, 2)))

    first, second, thrown_away = evaluate(3), evaluate(4), evaluate(5)
    assert counter.count == 0
    second.sum().backward()
    assert counter.count == 4
    (first.sum() + first.square().mean()).backward()
    assert counter.count == 4 + 3
    del thrown_away
    with torch.no_grad():
        evaluate(6)
    network.weight.requires_grad_(False)
    evaluate(7)
    assert counter.count == 4 + 3


def test_a_graph_with_several_losses_counts_once():
    network = Form(lambda x: x)
    counter = BackwardCounter([network])
    out = network(torch.ones(3, 2))
    out.sum().backward(retain_graph=True)
    out.mean().backward()
    assert counter.count == 3


def test_a_stand_in_of_another_process_does_not_count():
    network = Form(FORMS["tensor"][0])
    counter = BackwardCounter([network])
    token = fsdp_lockstep._STANDING_IN.set(True)
    stand_in = network(torch.ones(1, 2))
    fsdp_lockstep._STANDING_IN.reset(token)
    (stand_in.sum() * 0 + network(torch.ones(3, 2)).sum()).backward()
    assert counter.count == 3
