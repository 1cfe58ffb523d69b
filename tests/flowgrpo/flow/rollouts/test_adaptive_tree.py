"""The shapes that a run's own rewards give its trees: settled before they are seen, alike everywhere, and resumed."""

import ahead
import pytest
import torch
from field import differing, lines, settings, trainer
from oracle import batch, row
from oracle import trainer as on_gaussian
from pair import pair
from tree_variance import adaptive, exact_brush, exact_chain, price, target

from flowgrpo.errors import InputError
from flowgrpo.flow.planning.iteration_forecast import count_kept, predict_cost
from flowgrpo.flow.planning.plan import config_at_step
from flowgrpo.flow.rollouts.adaptive_tree import Shaping, sibling_squares
from flowgrpo.training.checkpoints import checkpoint

pytestmark = pytest.mark.usefixtures("noise_drawn_once")
ALGORITHM = {"preset": "adaptive", "tree": {"branches": 4, "every": 2}}
ADAPTIVE = {"algorithm": ALGORITHM, "train__group_size": 8, "train__learning_rate": 1e-3}


def shapes_of(run):
    """The shape of each iteration of a run, as it rolls out, and what is then known of later ones."""
    shapes, known, real = [], [], run.rollout

    def rollout(iteration, groups):
        shapes.append(run.shaping.algorithm(iteration).tree.profile)
        known.append(run.shaping.state()["shapes"])
        return real(iteration, groups)

    run.rollout = rollout
    run.run()
    return shapes, known


def test_squares_and_freedom_are_those_of_siblings_alone():
    comparison = torch.tensor([[0, 0, 1], [0, 0, 1], [0, 1, 1], [0, 1, 1], [0, 0, 3], [0, 0, 3], [0, 0, 3], [1, 0, 3]])
    values = torch.tensor([1.0, 3.0, 11.0, 12.0, 1.0, 2.0, 6.0, 9.0], dtype=torch.float64)
    squares, freedom = sibling_squares(values, comparison, 3)
    assert squares.tolist() == [2.0 + 0.5, 0.0, 14.0]  # deviations -1 1, -0.5 0.5; -2 -1 3
    assert freedom.tolist() == [2.0, 0.0, 2.0]
    values[4] = torch.nan  # lost: the mean is that of the two left
    assert sibling_squares(values, comparison, 3)[0].tolist() == [2.5, 0.0, 8.0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was never stopped, its shapes, and what is known of later ones."""
    run = trainer(settings(tmp_path_factory.mktemp("whole"), **ADAPTIVE))
    return run, *shapes_of(run)


def test_a_shape_is_settled_by_rewards_before_it_and_its_cost_stays(whole):
    run, told, known = whole
    assert told[0] is told[1] is None
    assert told[2] is not None
    assert told[2] == told[3] == known[2]["2"]
    assert "2" not in known[1]  # by the rewards of both iterations before
    costs = [line["cost/rollout_evaluations"] for line in lines(run)]
    first = predict_cost(run.config, 6).rollout
    assert costs[:2] == [first, first]
    assert all(first - 4 * 2 * 5 < cost <= first for cost in costs[2:])  # less than the dearest child of each seed
    most = count_kept(run.config, 6)[1]
    assert all(line["cost/decoded"] <= 4 * most for line in lines(run))


def test_a_resume_has_the_shapes_of_the_run_that_was_never_stopped(tmp_path, whole):
    run, told, _ = whole
    trainer(settings(tmp_path, **ADAPTIVE, train__iterations=3)).run()
    rest = trainer(settings(tmp_path, **ADAPTIVE))
    rest.resume()
    assert shapes_of(rest)[0] == told[3:]
    assert told[4] not in (None, told[2])  # it went on learning
    assert rest.shaping.state() == run.shaping.state()
    held = checkpoint.rollout_state(checkpoint.find(tmp_path / "r" / "checkpoints", 6))
    drawn = config_at_step(rest.config, 6, held).algorithm.tree.profile  # by a plan of its folder
    assert drawn == held["shapes"]["6"]
    assert lines(rest) == lines(run)
    assert not differing(run, rest)


def test_a_checkpoint_without_shapes_is_refused(tmp_path):
    shaping = Shaping(settings(tmp_path, **ADAPTIVE))
    whole = {"squares": [1.0] * 5, "freedom": [2.0] * 5, "shapes": {"4": [2, 3, 4, 5, 6]}}
    shaping.restore(whole)
    assert shaping.state() == whole
    assert shaping.algorithm(3).tree.profile is None
    assert shaping.algorithm(9).tree.profile == [2, 3, 4, 5, 6]
    changed = [{"freedom": [1.0]}, {"shapes": {"4": [1] * 5}}, {"shapes": 3}]
    for wrong in (None, {}, [1], *({**whole, **own} for own in changed)):
        with pytest.raises(InputError, match=r"^run\.resume: the checkpoint holds no shapes"):
            shaping.restore(wrong)
    assert shaping.state() == whole


def test_rollouts_that_are_behind_have_shapes_settled_as_much_earlier(tmp_path):
    run = trainer(settings(tmp_path, **ADAPTIVE, run__staleness=2))
    told, known = shapes_of(run)
    assert told[:4] == [None] * 4  # 2 is settled before the first rewards are seen
    assert told[4] == told[5] == known[2]["4"]  # whose weights are those before iterations 2 and 3


def test_two_processes_settle_the_shapes_of_one(tmp_path):
    first, second = pair(ahead.adapting, tmp_path)
    assert first == second
    assert first == ahead.adapted(tmp_path / "alone")


def test_steps_weigh_alike_in_the_update_whatever_their_numbers_of_children():
    """And the signal of each is its own, on the Gaussian flow, where it is known."""
    shares = []
    for shape in (None, [3, 2, 9, 2, 5, 2, 12, 30, 2]):
        with on_gaussian("adaptive", "quadratic", **{"algorithm.tree.profile": shape}) as run:
            shares.append(batch(run, "quadratic", 0).weight)
    assert shares[0] == pytest.approx(shares[1])
    found = row("adaptive", "quadratic", batches=8, **{"algorithm.tree.profile": [3, 2, 9, 2, 5, 2, 12, 30, 2]})
    assert abs(found.size - 1) < 3 * found.error < 0.5
    assert found.worst < 4


@pytest.mark.parametrize("weights", [pytest.param("none", marks=pytest.mark.zoo), "noise_aware"])
def test_it_varies_less_for_its_cost_than_chains_and_brushes_of_one_number(weights):
    """By the closed form of the linear reward; docs/research/oracle.md has what a run measures."""
    aim = target("linear", weights)
    found, shape = adaptive("linear", 8, weights, **{"algorithm.tree.every": 3})
    best = min(*(exact_brush([n] * 9, aim) for n in range(2, 25)), *(exact_chain(n, aim) for n in (8, 24)))
    assert exact_brush(shape, aim) < 0.7 * best
    assert exact_brush([6] * 9, aim) == pytest.approx((18 + 6 * 45) * 2 / 5)
    measured, error = price(found, aim)
    assert abs(measured - exact_brush(shape, aim)) < 3 * error
