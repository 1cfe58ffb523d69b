"""Layers that multiply in eight bits: their codes, scales and products, and what rows know of each other."""

import pytest
import torch

from flowgrpo.training.weights.low_precision_layers import EightBitLinear

INPUTS, OUTPUTS = 48, 32
WORDS = ("int8", "fp8")
E4M3 = sorted({sign * m * 2.0**e for sign in (-1, 1) for e in range(-9, 6) for m in range(16) if m * 2.0**e <= 448})


def linear(*, bias=True):
    torch.manual_seed(0)
    return torch.nn.Linear(INPUTS, OUTPUTS, bias=bias).requires_grad_(False)


def inputs(rows=40):
    spread = torch.logspace(-3, 3, rows)[:, None]
    return spread * torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(1))


def rounded(x, word):
    """Rows of numbers, each rounded to the values that eight bits have, of which its largest number is the largest."""
    values = torch.arange(-127.0, 128.0).double() if word == "int8" else torch.tensor(E4M3, dtype=torch.float64)
    scale = x.double().abs().amax(1, keepdim=True) / values[-1]
    nearest = ((x.double() / scale)[..., None] - values).abs().argmin(-1)
    return values[nearest] * scale


@pytest.mark.parametrize(("word", "error"), [("int8", 1e-6), ("fp8", 2**-8)])  # of a sum, and of bfloat16
@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_that_of_rounded_rows_and_weights(word, error, bias):
    own, x = linear(bias=bias), inputs()
    by_hand = rounded(x, word) @ rounded(own.weight, word).T + (own.bias.double() if bias else 0)
    product = EightBitLinear(own, word)(x)
    assert product.dtype == x.dtype
    allowed = error * (rounded(x, word).abs() @ rounded(own.weight, word).abs().T + 1)
    assert ((product.double() - by_hand).abs() <= allowed).all()


@pytest.mark.parametrize(("word", "error"), [("int8", 0.5 / 127), ("fp8", 2**-4)])
def test_the_weights_that_a_layer_tells_are_those_it_has_up_to_rounding(word, error):
    own = linear()
    gap = (EightBitLinear(own, word).weight - own.weight).abs()
    assert gap.max() > 0
    assert (gap <= 1.001 * error * own.weight.abs().amax(1, keepdim=True)).all()


def test_an_int8_row_is_to_the_bit_the_same_alone_and_among_others():
    layer, x = EightBitLinear(linear(), "int8"), inputs()
    together = layer(x)
    assert all(torch.equal(layer(x[rows]), together[rows]) for rows in (slice(0, 1), slice(3, 20), slice(5, 40)))
    assert torch.equal(layer(x[7]), together[7])
    assert torch.equal(layer(x.unflatten(0, (4, 2, 5))), together.unflatten(0, (4, 2, 5)))


@pytest.mark.parametrize("word", WORDS)
def test_an_input_whose_columns_lie_together_is_as_good(word):
    layer, x = EightBitLinear(linear(), word), inputs()
    assert torch.equal(layer(x.t().contiguous().t()), layer(x))


@pytest.mark.parametrize("word", WORDS)
def test_zeros_give_the_bias_and_what_is_not_finite_stays_in_its_row(word):
    own, x = linear(), inputs()
    layer, x[3] = EightBitLinear(own, word), 0.0
    plain = layer(x)
    assert torch.equal(plain[3], own.bias)
    for value in (torch.nan, torch.inf):
        x[5, 2] = value
        product = layer(x)
        assert product[5].isnan().all()
        assert torch.equal(product[:5], plain[:5])
    own.weight[4] = 0.0
    assert torch.equal(EightBitLinear(own, word)(inputs())[:, 4], own.bias[4].expand(40))


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_comes_out_as_it_went_in_and_large_sums_do_not_overflow(word, dtype):
    own = linear().to(dtype)
    x = (1000 * torch.sign(own.weight[:1])).expand(40, INPUTS)
    product = EightBitLinear(own, word)(x)
    assert product.dtype == dtype
    torch.testing.assert_close(product[:, 0], own(x)[:, 0], rtol=0.05, atol=0)


def test_autocast_decides_the_type_of_the_product():
    with torch.autocast("cpu", torch.bfloat16):
        assert EightBitLinear(linear(), "int8")(inputs()).dtype == torch.bfloat16
