"""Every flow preset's update, by the code of a run, against the exact gradient."""

import functools
import statistics
from dataclasses import replace
from itertools import product

import oracle
import pytest
import torch
from oracle import PRESETS
from oracle_page import numbers, on_page
from oracle_presets import line

from flowgrpo.flow.methods import CHOICES
from flowgrpo.flow.trainer import FlowWing
from flowgrpo.training.advantages import unit_selection

EXACT = [name for name in PRESETS if name != "vgpo"]  # whose edges' weights depend on the reward
# A plain run leaves out what has the kernel and the credit of others, and their kind of tree; `adaptive`, whose children of
# any numbers `test_shaping` tries; and `vgpo`, of which no closed form is known.
VARIANTS = ("flow_grpo_fast", "flow_grpo_window", "mix_grpo", "pref_grpo", "branch_grpo_mix", "adaptive", "vgpo")
# Of one tree and kernel; the objective of `grpo_guard` keeps the means of steps, too.
ROLLED_AS = {"flow_grpo": "grpo_guard", "ctpo": "grpo_guard"}
WHOLE = {"algorithm.baseline": {"name": "leave_one_out"}}
pytestmark = pytest.mark.usefixtures("noise_drawn_once")


def cases(names, left_out=VARIANTS):
    return [pytest.param(name, marks=pytest.mark.zoo if name in left_out else ()) for name in names]


def enough(preset):
    """How many of the page's batches tell the size of an update to a tenth."""
    whole = oracle.FEWER.get(preset, oracle.BATCHES)
    return whole if preset in VARIANTS else 3 * whole // 5


@functools.cache
def rolled(preset, batches):
    """A preset's first batches as they were rolled out, and the row of the page that they make."""
    rollouts, seen = [], []
    with oracle.trainer(preset, "quadratic") as run:
        for iteration in range(batches):
            alike = ROLLED_AS.get(preset)
            rollouts.append(rolled(alike, batches)[0][iteration] if alike else run.made(iteration))
            seen.append(oracle.batch(run, "quadratic", iteration, rollouts[-1]))
    return rollouts, oracle.summary(preset, "quadratic", seen, oracle.GROUPS)


def of(preset):
    return rolled(preset, enough(preset))[1]


def again(preset, batches=None, **overrides):
    """The row that a changed update makes of the first of these batches, by default of all."""
    with oracle.trainer(preset, "quadratic", **overrides) as run:
        rollouts = enumerate(rolled(preset, enough(preset))[0][:batches])
        seen = [oracle.batch(run, "quadratic", iteration, made) for iteration, made in rollouts]
    return oracle.summary(preset, "quadratic", seen, oracle.GROUPS)


@pytest.mark.parametrize("preset", cases(EXACT))
def test_an_update_is_in_expectation_what_its_edges_make_of_the_reward(preset):
    found = of(preset)
    assert abs(found.size - 1) < 3 * found.error
    assert found.error < 0.1
    assert found.worst < 4  # of up to twenty steps and parameters, each in standard errors
    assert found.compared > 4


@pytest.mark.parametrize(("preset", "alike"), ROLLED_AS.items())
def test_presets_that_differ_in_their_objective_alone_roll_out_the_same(preset, alike):
    with oracle.trainer(preset, "quadratic") as run:
        made, other = run.made(1), rolled(alike, enough(alike))[0][1]
    assert made.evaluations == other.evaluations
    assert torch.equal(made.batch.tree.samples[0], other.batch.tree.samples[0])
    assert [[edges.log_prob.tolist() for edges in e.trained] for e in made.batch.tree.evaluations] == [
        [edges.log_prob.tolist() for edges in e.trained] for e in other.batch.tree.evaluations
    ]


def test_brushes_climb_what_ode_samples_earn_and_chains_what_noisy_ones_do():
    brush, chain, dense = of("tempflow"), of("flow_grpo"), of("dense_grpo")
    assert chain.to_chain == pytest.approx(1)
    assert chain.to_ode == pytest.approx(0.985994309)
    assert dense.to_ode == pytest.approx(0.999921282)
    assert brush.evaluations > dense.evaluations > chain.evaluations
    assert brush.noise < chain.noise


def test_leave_one_out_leaves_the_whole_of_a_gradient():
    """Expectation is reckoned with a mean over all of a group, which is smaller."""
    found = again("flow_grpo", **WHOLE)
    assert abs(found.size * 7 / 8 - 1) < 3 * found.error
    assert found.size - 1 > found.error


def change_baseline(patch):
    real = unit_selection.normalize_advantages

    def changed(*args, **options):
        advantages, trained = real(*args, **options)
        return -advantages, trained

    patch.setattr(unit_selection, "normalize_advantages", changed)


def change_credit(patch):
    real = FlowWing.units

    def changed(self, batch):
        units = real(self, batch)
        return replace(units, values=-units.values)

    patch.setattr(FlowWing, "units", changed)


def change_objective(patch):
    for kind in CHOICES["objective"].values():
        patch.setattr(kind, "loss", lambda self, inputs, real=kind.loss: -real(self, inputs))


@pytest.mark.parametrize("change", [change_baseline, change_credit, change_objective])
@pytest.mark.parametrize("preset", cases(EXACT, {*EXACT} - {"flow_grpo", "tempflow", "flow_dppo"}))
def test_a_sign_that_is_wrong_anywhere_is_seen(monkeypatch, preset, change):
    of(preset)  # as they are, before the change
    change(monkeypatch)
    found = again(preset, 4)
    assert found.size < 0 < 1 - found.size - 4 * found.error


@pytest.mark.zoo
@pytest.mark.parametrize("preset", PRESETS)
def test_the_page_has_the_row(preset):
    """Its numbers come of fixed seeds, so they are the same but for rounding."""
    there, batches = on_page("All presets")[f"`{preset}`"], oracle.FEWER.get(preset, oracle.BATCHES)
    assert numbers(line(rolled(preset, batches)[1])) == pytest.approx(numbers(there), abs=0.011, rel=0.02)


WEIGHTS = {
    "default": {},
    "siblings": {"group": 0, "siblings": 1},
    "all": {"group": 1.0, "between": 1.0, "siblings": 1.0},
}


# On a tree of several depths, and on brushes, whose edges have an ODE trunk.
NESTED = [("branch_grpo", "siblings"), ("branch_grpo", "all"), ("tempflow", "default")]


@pytest.mark.parametrize(
    ("preset", "weights"),
    [
        pytest.param(*pair, marks=() if pair in NESTED else pytest.mark.zoo)
        for pair in product(("branch_grpo", "branch_grpo_mix", "tempflow"), WEIGHTS)
    ],
)
def test_nested_comparisons_leave_the_whole_of_every_edge(preset, weights):
    """Whatever the weights, and where siblings share a part of their noise; a group mean leaves half of the first split."""
    found = again(preset, **WHOLE, **{"algorithm.credit": {"name": "nested", **WEIGHTS[weights]}})
    assert abs(found.size - 1) < 3 * found.error
    assert found.error < 0.15
    assert found.worst < 4


@pytest.mark.zoo
def test_the_comparison_with_the_group_hides_no_weight_of_the_steps():
    """By the mean of a depth the first edges of a tree of 16 would have half of their signal, and by this the whole.

    Steps between the splits are by ODE, without noise that would only hide the signal.
    """
    chosen = {"algorithm.credit": {"name": "nested", "group": 1, "siblings": 0}, "algorithm.tree.siblings": "own"}
    chosen |= {"algorithm.tree.size": 1, "train.groups": 40, "train.group_size": 16}
    with oracle.trainer("branch_grpo_mix", "linear", **WHOLE, **chosen) as run:
        seen = [oracle.batch(run, "linear", iteration) for iteration in range(12)]
    signal = [each.signal[0].theta for each in seen]
    exact, error = seen[0].exact[0].theta, statistics.stdev(signal) / len(signal) ** 0.5
    assert abs(statistics.mean(signal) - exact) < 3 * error
    assert abs(exact / 2) > 4 * error
