"""The expected reward of one drawn token against draws that are enumerated, and its limits."""

from itertools import product

import pytest
import torch

from flowgrpo.mdlm.methods.likelihoods.one_token_reward import one_token_reward

LOGITS = torch.tensor([[0.3, -1.2, 0.8, -torch.inf], [2.0, 0.1, -0.4, -torch.inf]], dtype=torch.float64)
TOKENS = torch.tensor([2, 1])
SLOPE = torch.tensor([0.7, -1.3], dtype=torch.float64)


def gradient(**options):
    logits = LOGITS.clone().requires_grad_()
    (one_token_reward(logits, TOKENS, **options) * SLOPE).sum().backward()
    return logits.grad


def of_log_prob(tokens):
    """Gradient of log p of a token (N, V)."""
    logits = LOGITS.clone().requires_grad_()
    (logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0].sum()).backward()
    return logits.grad


@pytest.mark.parametrize("temperature", [1.0, 1.3, 0.6])
@pytest.mark.parametrize("wrong", [-0.1, 0.0, 0.4])
def test_it_is_the_mean_of_all_pairs_of_draws(wrong, temperature):
    """Two draws at each position, as the paper's estimate takes them: the mean of R grad log p over both."""
    chances = (LOGITS / temperature).softmax(-1)
    value, slope = torch.zeros(2, dtype=torch.float64), torch.zeros_like(LOGITS)
    for pair in product(range(3), repeat=2):
        chance = chances[:, pair[0]] * chances[:, pair[1]]
        for drawn in pair:
            reward = torch.where(drawn == TOKENS, 1.0, wrong)
            value += chance * reward / 2
            slope += (chance * reward / 2)[:, None] * of_log_prob(torch.full((2,), drawn))
    torch.testing.assert_close(one_token_reward(LOGITS, TOKENS, wrong, temperature), value)
    torch.testing.assert_close(gradient(wrong=wrong, temperature=temperature), slope * SLOPE[:, None])


@pytest.mark.parametrize("wrong", [-0.1, 0.0, 0.4])
def test_at_temperature_1_it_is_log_p_weighted_by_p(wrong):
    chance = LOGITS.softmax(-1).gather(-1, TOKENS[:, None])
    expected = (1 - wrong) * chance * of_log_prob(TOKENS) * SLOPE[:, None]
    torch.testing.assert_close(gradient(wrong=wrong, temperature=1.0), expected)


def test_the_limit_of_high_temperatures_is_supervised_fine_tuning():
    """Each of the three possible tokens is drawn alike, and only the right one counts."""
    found = gradient(wrong=0.0, temperature=1e9)
    torch.testing.assert_close(found, of_log_prob(TOKENS) / 3 * SLOPE[:, None], rtol=1e-6, atol=0)


def test_equal_rewards_and_impossible_tokens_teach_nothing():
    torch.testing.assert_close(gradient(wrong=1.0, temperature=1.0), torch.zeros_like(LOGITS))
    logits = torch.tensor([[0.0, -60.0]], requires_grad=True)
    one_token_reward(logits, torch.tensor([1]), 0.0, 1.0).sum().backward()
    assert logits.grad.abs().max() < 1e-20


def test_half_precision_is_computed_in_float32_in_any_portions(monkeypatch):
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    tokens = torch.tensor([0, 6, 3, 3, 1])
    found = one_token_reward(logits, tokens, -0.1, 1.3)
    assert found.dtype == torch.float32
    found.sum().backward()
    whole, logits.grad = logits.grad, None
    monkeypatch.setattr("flowgrpo.mdlm.decoding.tokens.logit_chunks.CACHED", 14)  # two rows
    torch.testing.assert_close(one_token_reward(logits, tokens, -0.1, 1.3), found)
    one_token_reward(logits, tokens, -0.1, 1.3).sum().backward()
    assert torch.equal(logits.grad, whole)
    assert one_token_reward(logits[:0], tokens[:0], -0.1, 1.3).shape == (0,)
