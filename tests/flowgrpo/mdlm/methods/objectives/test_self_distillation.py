"""Self-distillation towards good siblings, beside the loss as the paper's code writes it, in plain Python."""

import math

import pytest
import torch

from flowgrpo.mdlm.methods.objectives.objective import LossInputs, TokenRatio
from flowgrpo.mdlm.methods.objectives.self_distillation import BranchTokens, SelfDistillation, pull_tokens

RULE = SelfDistillation(weight=0.5, growth=2.0, temperature=2.0, power=0.7)


@pytest.mark.parametrize("done", [0.0, 0.25, 0.5, 1.0])
def test_the_weight_rises_exponentially_and_the_temperature_falls(done):
    rule = SelfDistillation()
    assert rule.weight_at(done) == pytest.approx(3e-3 * (math.exp(2 * done) - 1) / (math.exp(2) - 1))
    assert rule.temperature_at(done) == max(2.0 * (1 - done) ** 0.7, 1e-6)


# Siblings: advantage, and the token at each of two positions; None where it wrote none, or none that counts.
CANVASES = [
    [(0.5, (3, 1)), (1.0, (3, None)), (-1.5, (0, 1)), (0.2, (2, 0))],  # two of three good ones agree on the first token
    [(0.3, (1, None)), (-0.3, (2, 2))],
    [(0.0, (1, 1)), (0.0, (2, 2))],  # teaches nothing
]


def released(canvases, log_prob, done):
    """The loss: `log_prob(canvas, position, token)` is the policy's."""
    temperature = 2.0 * (1 - done) ** 0.7
    total, count = 0.0, 0
    for canvas, siblings in enumerate(canvases):
        good = [(advantage, tokens) for advantage, tokens in siblings if advantage > 0]
        powers = [math.exp(advantage / temperature) for advantage, _ in good]
        for position in range(2):
            written = {}
            for power, (_, tokens) in zip(powers, good, strict=True):
                if tokens[position] is not None:
                    written[tokens[position]] = written.get(tokens[position], 0.0) + power / sum(powers)
            if written:
                mass = sum(written.values())
                for token, weight in written.items():
                    q = weight / mass
                    total = total + q * (math.log(q) - log_prob(canvas, position, token))
                count += 1
    return 0.5 * (math.exp(2 * done) - 1) / (math.exp(2) - 1) * total / count


def answers(canvases):
    """The siblings as rows: their tokens, 0 where there is none."""
    rows = [(canvas, *sibling) for canvas, siblings in enumerate(canvases) for sibling in siblings]
    written = torch.tensor([[token is not None for token in tokens] for _, _, tokens in rows])
    tokens = BranchTokens(
        advantage=torch.tensor([[advantage] * 2 for _, advantage, _ in rows]),
        scored=written,
        origin=torch.tensor([[[canvas, -1]] * 2 for canvas, _, _ in rows]),
    )
    canvas = torch.tensor([canvas for canvas, _, _ in rows])
    return tokens, canvas, torch.tensor([[token or 0 for token in tokens] for _, _, tokens in rows])


@pytest.mark.parametrize("done", [0.25, 0.9])
def test_the_gradient_is_that_of_the_released_loss(done):
    torch.manual_seed(0)
    logits = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    prediction = logits.log_softmax(-1)
    (expected,) = torch.autograd.grad(released(CANVASES, lambda *at: prediction[at], done), logits)
    tokens, canvas, ids = answers(CANVASES)
    pull = RULE.pull(tokens, done)
    new = logits.log_softmax(-1)[canvas[:, None], torch.arange(2), ids].where(tokens.scored, 0.0)[None]
    inputs = LossInputs(
        old=new.detach(),
        new=new,
        reference=None,
        weight=tokens.scored[None].double(),
        view_weight=torch.ones(1),
        length=tokens.scored.sum(1),
        advantage=tokens.advantage,
        group=canvas,
        rank=torch.zeros(len(canvas)),
        token_weight=torch.zeros_like(pull),  # leaves the ratios out
        active_views=torch.ones(1, len(canvas), dtype=torch.bool),
        order=torch.zeros_like(ids),
        pull=pull,
    )
    (found,) = torch.autograd.grad(TokenRatio(distillation=RULE).loss(inputs), logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)
    assert expected.abs().max() > 0.01
    assert not expected[2].any()


def test_weights_of_two_tokens_by_hand():
    siblings = [[(0.5, (3, 1)), (1.0, (3, None)), (-1.5, (0, 1))]]
    first, second = math.exp(0.5 / RULE.temperature_at(0.5)), math.exp(1.0 / RULE.temperature_at(0.5))
    weight = RULE.weight_at(0.5) / 2  # of each of two positions
    expected = [[first / (first + second), 1.0], [second / (first + second), 0.0], [0.0, 0.0]]
    torch.testing.assert_close(RULE.pull(answers(siblings)[0], 0.5), weight * torch.tensor(expected))


def test_at_the_end_the_best_sibling_alone_is_learnt():
    pull = RULE.pull(answers([[(0.5, (3, 1)), (1.0, (2, 0))]])[0], 1.0)
    assert pull.tolist() == [[0.0, 0.0], [0.25, 0.25]]


@pytest.mark.parametrize("done", [0.0, 0.5])
def test_without_a_good_sibling_or_at_the_start_nothing_is_learnt(done):
    siblings = [[(-0.5, (3, 1)), (0.0, (3, 1))]] if done else CANVASES
    assert not RULE.pull(answers(siblings)[0], done).any()


def test_processes_compare_siblings_with_each_other():
    tokens = answers(CANVASES)[0]
    own, other = ({name: each[part] for name, each in vars(tokens).items()} for part in (slice(3, 9), slice(0, 3)))
    found = pull_tokens(RULE, BranchTokens(**own), 0.5, gather=lambda mine: [(0, other), *mine], rank=1)
    assert torch.equal(found, RULE.pull(tokens, 0.5)[3:])
