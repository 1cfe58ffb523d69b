"""Every text preset's update, by the code of a run, against gradients that are sums over all that a decoder can do."""

import functools

import oracle_texts
import pytest
import torch
from cases import cases
from oracle_page import numbers, on_page
from oracle_presets import line
from oracle_texts import PRESETS, VARIANTS, row
from tiny_texts import Decoding, Exact, Table

from flowgrpo.mdlm.methods import CHOICES
from flowgrpo.mdlm.trainer import TextWing

NAMED = {each.name or each.preset: each for each in VARIANTS}
DEFINED = [name for name, each in NAMED.items() if each.own is not None]
EXACT = [
    "just_grpo",
    "cj_grpo, random",
    "cj_grpo, random, nested",
    "cj_grpo, entropy, token_mean",
    "trace_rl, left_to_right, unmerged",
]
ORDERS = ("confidence", "gumbel", "entropy", "random", "left_to_right")


@functools.cache
def of(name):
    return row(NAMED[name])


@pytest.mark.parametrize("order", ORDERS)
def test_what_a_decoder_earns_has_the_gradient_of_its_differences(order):
    decoding, table = Decoding(order, temperatures=((0.8, 0.6), (1.3, 0.4))), Table()
    gradient = Exact(table, decoding).gradient
    assert sum(map(float, Exact(table, decoding).texts().values())) == pytest.approx(1)
    values = torch.nn.utils.parameters_to_vector(table.parameters()).detach()
    for index in range(0, len(values), 5):
        earned = []
        for shift in (1e-2, -1e-2):
            torch.nn.utils.vector_to_parameters(values + shift * torch.eye(len(values))[index], table.parameters())
            earned.append(float(Exact(table, decoding).earned.detach()))
        assert (earned[0] - earned[1]) / 2e-2 == pytest.approx(float(gradient[index]), abs=1e-4)


@pytest.mark.parametrize("order", ["random", "entropy", "left_to_right"])
def test_an_order_that_no_letter_decides_leaves_a_trajectory_s_likelihood_exact(order):
    exact = Exact(Table(), Decoding(order))
    torch.testing.assert_close(exact.by_trajectory, exact.gradient)


def test_all_presets_are_tried():
    assert {name for name in NAMED if NAMED[name].name is None} == PRESETS.keys()


@pytest.mark.parametrize(
    "name", cases([n for n in NAMED if n != "igpo"], {*PRESETS, "igpo, no hints"})
)  # igpo may be given answers
def test_a_decoder_draws_the_texts_that_are_counted(name):
    assert of(name).drawn < 4  # the worst of eight, in standard errors


@pytest.mark.parametrize("name", DEFINED)
def test_an_update_is_in_expectation_the_gradient_of_the_estimate_that_it_is_defined_by(name):
    assert of(name).worst < 4  # of so many parameters, in standard errors
    assert of(name).compared >= 12


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_likelihood_climbs_what_its_decoder_earns(name):
    found = of(name)
    assert found.exact == pytest.approx(1)
    assert abs(found.size - 1) < 3 * found.error
    assert found.error < 0.06
    assert found.cosine > 0.98


def test_estimates_that_see_no_letter_turn_away_and_those_of_random_masks_by_less():
    for name in ("diffu_grpo", "diffu_grpo_fast", "trace_rl", "igpo, no hints"):
        assert of(name).cosine < 0.8
    for name in ("gdpo", "bgpo", "spg"):
        assert 0.8 < of(name).cosine < 0.97
    assert of("bgpo, random, temperature 1").cosine > of("bgpo").cosine + 0.04


def test_confidence_decides_an_order_that_a_trajectory_s_likelihood_leaves_out():
    assert of("cj_grpo").exact == pytest.approx(0.9966, abs=1e-3)
    assert of("cj_grpo, entropy").cosine < 0.96  # a mean over steps weighs a letter of a step of two half


def change_objective(patch):
    for kind in CHOICES["objective"].values():
        patch.setattr(kind, "loss", lambda self, inputs, real=kind.loss: -real(self, inputs))


def change_units(patch):
    real = TextWing.units

    def changed(self, batch):
        units = real(self, batch)
        units.values.neg_()
        return units

    patch.setattr(TextWing, "units", changed)


EACH_OBJECTIVE = ("diffu_grpo_fast", "gdpo", "bgpo", "spg")  # in every run of the suite; the others where it runs whole
SIGNS = [
    pytest.param(preset, change_objective, marks=() if preset in EACH_OBJECTIVE else pytest.mark.zoo)
    for preset in PRESETS
    if preset != "igpo"
]


@pytest.mark.parametrize(("preset", "change"), [("just_grpo", change_units), *SIGNS])
def test_a_sign_that_is_wrong_anywhere_is_seen(monkeypatch, preset, change):
    change(monkeypatch)
    found = row(NAMED[preset], batches=3)
    assert found.size + 3 * found.error < 0.2


@pytest.mark.parametrize("preset", PRESETS)
def test_the_table_of_all_presets_has_the_row(preset):
    row_there = on_page("All presets")[f"`{preset}`"]
    assert numbers(line(of(preset))) == pytest.approx(numbers(row_there), abs=0.021, rel=0.03)


def test_the_page_has_the_table():
    """Its numbers come of fixed seeds, so they are the same but for rounding."""
    there = on_page("Text presets")
    assert there.keys() == {f"`{name}`" for name in NAMED}
    _, _, *lines = oracle_texts.table([of(name) for name in NAMED], VARIANTS)
    for each in lines:
        assert numbers(each) == pytest.approx(numbers(there[each.split("|")[1].strip()]), abs=0.021, rel=0.03)
