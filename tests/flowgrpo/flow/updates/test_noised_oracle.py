"""What updates by final samples climb, against closed forms: every preset, and signs that are changed."""

from itertools import product

import pytest
from cases import cases
from oracle_page import numbers, on_page
from oracle_presets import line
from oracle_samples import OPEN, PRESETS, RANKED, row

from flowgrpo.flow.methods import CHOICES, sample_presets
from flowgrpo.flow.methods.likelihood import Elbo
from flowgrpo.training.advantages import baseline

EXACT = [name for name in PRESETS if name not in OPEN]
# A plain run leaves them out: at their anchor `pepg` and `elbo_grpo` take the step of `epg`, `awm_fast` that of `awm`, and
# `sol_rl` that of `nft`, at fewer noise levels.
ALIKE = ("pepg", "elbo_grpo", "awm_fast", "awm_tree", "awm_late", "awm_brush", "sol_rl")
KINDS = [name for name in PRESETS if name not in ALIKE]
SIGNS = {*product(["objective"], KINDS), *product(["baseline", "likelihood"], ["nft", "dpo"])}
pytestmark = pytest.mark.usefixtures("noise_drawn_once")


@pytest.mark.parametrize("preset", cases(EXACT, KINDS))
def test_the_update_is_the_gradient_that_is_expected(preset):
    seen = row(preset, "quadratic", 8)
    assert abs(seen.size - 1) < 3 * seen.error < 0.5
    assert seen.worst < 4  # of many


@pytest.mark.parametrize("preset", RANKED)
def test_ranks_point_the_way_that_rewards_do(preset):
    assert row(preset, "linear", 4, groups=16).to_ode > 0.7


def test_whole_branch_trees_point_where_chains_do():
    trees, chains = (row(preset, "linear", 8, groups=16).to_ode for preset in ("awm_tree", "awm_fast"))
    assert trees == pytest.approx(chains, abs=0.05)


def test_the_true_weight_turns_the_update_to_the_exact_gradient():
    """The weight of noise levels is a part of what is climbed: (1 - s) / s, 1 and s^2."""
    found = {}
    for weight in ("exact", "velocity", "x0"):
        changed = {"algorithm.likelihood.weight": weight, "algorithm.kernel": "ode"}
        found[weight] = row("epg", "linear", 3, groups=16, **changed).to_ode
    assert found == pytest.approx({"exact": 0.988, "velocity": 0.843, "x0": 0.537}, abs=0.03)


@pytest.mark.parametrize("preset", cases(PRESETS, ["nft"]))
def test_the_page_has_the_row(preset):
    assert numbers(line(row(preset, "quadratic"))) == pytest.approx(
        numbers(on_page("All presets")[f"`{preset}`"]), abs=0.02
    )


@pytest.mark.parametrize(("part", "preset"), cases(product(["baseline", "objective", "likelihood"], PRESETS), SIGNS))
def test_a_changed_sign_is_seen(preset, part, monkeypatch):
    if part == "baseline":
        honest = baseline.Baseline.advantages
        monkeypatch.setattr(baseline.Baseline, "advantages", lambda *a, **k: -honest(*a, **k))
    elif part == "objective":
        kind = CHOICES["objective"][sample_presets.PRESETS[preset]["objective"]["name"]]
        own = kind.loss
        monkeypatch.setattr(kind, "loss", lambda self, inputs: -own(self, inputs))
    elif preset == "ram":
        pytest.skip("its loss is of velocities, and asks for no likelihood")
    else:
        scored = Elbo.log_prob
        monkeypatch.setattr(Elbo, "log_prob", lambda self, error, sigma: -scored(self, error, sigma))
    seen = row(preset, "linear", 3, groups=5)
    assert (seen.to_ode if seen.size is None else seen.size) < -0.2
