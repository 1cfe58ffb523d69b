"""What is changed of a preset changes its update's size and direction as closed forms say."""

import functools
from dataclasses import replace

import oracle_effects
import oracle_families
import oracle_stale
import pytest
from oracle_page import check_known, numbers, on_page
from oracle_variants import effects

TRAINED = [family.__name__ for family in oracle_families.FAMILIES]
MOVED = {"1 stale": (oracle_stale.stale, 1), "2 stale": (oracle_stale.stale, 2), "4 stale": (oracle_stale.stale, 4)}
PLAIN = ("comparisons", "2 stale")  # in every run of the suite; the others where it runs whole
REST = "the other comparisons"
# Variants of `comparisons` that are in REST: medians stay in another, presets have these weights of steps, and the last
# ones have no closed form.
OTHERS = (
    "median, no spread", "step weights noise_aware", "step weights equalised", "select 3 of max_variance", "cumulative",
    "quantile",
)  # fmt: skip


def cases(names):
    return [pytest.param(name, marks=() if name in PLAIN else pytest.mark.zoo) for name in names]


def family_of(name):
    if name not in ("comparisons", REST):
        return getattr(oracle_families, name)()
    family = oracle_families.comparisons()
    return replace(family, variants=[each for each in family.variants if (each.name in OTHERS) == (name == REST)])


@functools.cache
def of(name):
    if name in MOVED:
        make, behind = MOVED[name]
        found = make(behind)
    else:
        found = oracle_stale.passes() if name == "passes" else effects(family_of(name))
    return {each.name: each for each in found}


@pytest.mark.parametrize("name", cases([*TRAINED, REST, *MOVED]))
def test_an_update_has_the_size_and_the_direction_of_the_closed_form(name):
    check_known(of(name).values())


def test_baselines_differ_on_the_same_rollouts_as_they_should_to_the_last_digit():
    found = of("comparisons")
    plain = found["mean of the group"]
    assert found["leave_one_out"].size == pytest.approx(plain.size * 5 / 4, rel=1e-5)
    for same in ("soft_gate, or any clip", "prefix_ratio", "trajectory_ratio"):
        assert found[same].size == pytest.approx(plain.size, rel=1e-4)
        assert found[same].noise == pytest.approx(plain.noise, rel=1e-4)
    assert found["absolute"].noise < plain.noise


def test_a_std_of_each_group_and_the_choice_of_extremes_shift_weight_from_means_to_slopes():
    """The reward falls more steeply on one side, so that what divides by a group's spread is not a number for all."""
    found = of("comparisons")
    plain = found["mean of the group"]
    for name in ("std of the group", "select the 2 extremes, std of the group", "median, over mad, cut at 5"):
        assert found[name].phi > plain.phi + 0.2


@pytest.mark.zoo
def test_what_a_step_alone_is_normalised_by_turns_an_update_and_what_all_are_does_not():
    found = of("gains")
    joint, by_step = found["gains jointly"], found["gains by step, over their std"]
    assert joint.to_ode > 0.9998 > 0.997 > by_step.to_ode
    assert by_step.noise < joint.noise


@pytest.mark.parametrize("name", cases(["twigs", "finishes"]))
def test_values_of_one_jump_turn_an_update_away_from_what_samples_earn(name):
    whole, jump = of(name).values()
    assert whole.to_ode > 0.998
    assert jump.to_ode == pytest.approx(0.952, abs=0.001)
    assert jump.evaluations < whole.evaluations
    assert jump.noise * jump.evaluations**0.5 < whole.noise * whole.evaluations**0.5


@pytest.mark.zoo
def test_hot_siblings_turn_an_update():
    found = of("siblings")
    assert found["siblings own"].to_chain > 0.99 > 0.6 > found["siblings hot"].to_chain


@pytest.mark.zoo
def test_correlated_siblings_and_pruning_save_no_noise():
    correlated, top, extremes = of("pruned").values()
    assert correlated.noise == pytest.approx(of("siblings")["siblings own"].noise, rel=0.1)
    assert top.noise > correlated.noise
    assert extremes.turned > 5  # only chains below the last split are left out, so that these steps weigh more


@pytest.mark.parametrize("name", cases(MOVED))
def test_a_clip_that_moved_ratios_meet_shrinks_and_turns_an_update_and_a_ratio_alone_does_not(name):
    plain, clipped, prefix, trajectory = of(name).values()
    assert clipped.size < 0.75 * plain.size
    assert clipped.to_chain < 0.95 < 0.999 < min(plain.to_chain, prefix.to_chain, trajectory.to_chain)
    assert abs(trajectory.expected - 1) < prefix.expected - 1 < plain.expected - 1


@pytest.mark.zoo
def test_updates_of_one_batch_are_stopped_by_a_clip():
    plain, wide, narrow = of("passes").values()
    assert plain.size > wide.size + 3 * wide.error
    assert wide.size > narrow.size + 3 * narrow.error


@pytest.mark.parametrize("name", cases([*TRAINED, REST, *MOVED, "passes"]))
def test_the_page_has_the_table(name):
    there = on_page("What a change makes of an update")
    _, _, *lines = oracle_effects.table([*of(name).values()])
    for line in lines:
        assert numbers(line) == pytest.approx(numbers(there[line.split("|")[1].strip()]), abs=0.021, rel=0.03)
