"""Seconds of an iteration, by hand."""

import pytest

from flowgrpo import config
from flowgrpo.training.distributed.gpu_layout import Layout
from flowgrpo.training.planning.collective_traffic import LINK, NETWORK, PICKLED, Message, Messages
from flowgrpo.training.planning.gpu_types import Gpu
from flowgrpo.training.planning.iteration_cost import LAUNCH, Calls, Work, cost_of, forwards_of

RATE = 1e12
# Messages of 1 GB take a second within a machine, and 10 between machines.
GPU = Gpu(half=1, single=1, memory=1, link=1 / LINK, network=0.1 / NETWORK)
GB = 10**9
NOTHING = Message()


def sent(**changed):
    given = dict.fromkeys(("gather", "scatter", "spread", "step"), NOTHING) | changed
    return Messages(**given)


def work(**calls):
    return Work(
        samples=24, calls=calls, steps=2, trees=12, numbers=10, networks=[{"weight": (8, 8)}], width=2, trained=64
    )


def rollout(**changed):
    """Twelve trees of two samples, each of which goes through the model five times, a second a row."""
    return Calls(**{"units": 12, "width": 2, "sweeps": 5, "rows": 4, "operations": RATE, "gathers": 1} | changed)


def cost(calls, processes=1, messages=None, **layout):
    placed = Layout(processes=processes, **layout)
    return cost_of(work(**calls), placed, GPU, messages or sent(), rate=RATE, fixed=3.0)


@pytest.mark.parametrize(
    ("processes", "samples", "seconds"),
    [(1, 24, 120), (2, 12, 60), (3, 8, 40), (5, 6, 30), (8, 4, 20), (12, 2, 10), (100, 2, 10)],
)
def test_an_iteration_is_as_long_as_that_of_the_gpu_with_the_most_trees(processes, samples, seconds):
    found = cost({"rollout": [rollout()]}, processes)
    assert found.samples == samples
    assert found.seconds["rollout"] == seconds
    assert found.total == seconds + 3


def test_a_call_takes_as_long_as_its_work_or_what_it_gathers():
    wide = sent(gather=Message(bytes=3 * GB))
    # 24 rows in calls of 4: work of 4 s each hides the 3 s; 6 rows are calls of 4 and 2, of which one waits a second.
    assert cost({"rollout": [rollout()]}, 1, wide).seconds["traffic"] == 0
    assert cost({"rollout": [rollout()]}, 4, wide).seconds["traffic"] == 5 * 1
    assert cost({"rollout": [rollout()]}, 4, wide).seconds["rollout"] == 30
    crossing = sent(gather=Message(bytes=3 * GB, crosses=True))
    assert cost({"rollout": [rollout()]}, 4, crossing).seconds["traffic"] == 5 * (26 + 28)


def test_a_call_takes_no_less_than_a_core_takes_to_launch_it():
    """However few rows it has: 24 rows in calls of 4, and of 3 of 8 processes in calls of 3."""
    launched = rollout(launches=round(3.5 / LAUNCH), sweeps=1)
    assert cost({"rollout": [launched]}).seconds["rollout"] == pytest.approx(6 * 4)
    assert cost({"rollout": [launched]}, 8).seconds["rollout"] == pytest.approx(4)
    assert cost({"rollout": [launched]}, 12).seconds["rollout"] == pytest.approx(3.5, rel=1e-4)
    wide = sent(gather=Message(bytes=3 * GB))
    assert cost({"rollout": [launched]}, 12, wide).seconds["traffic"] == 0  # while they are launched


def test_a_backward_pass_gathers_again_and_scatters_its_sums():
    learning = rollout(operations=3 * RATE, gathers=2, sums=1, sweeps=1)
    messages = sent(gather=Message(bytes=5 * GB), scatter=Message(bytes=4 * GB), spread=Message(bytes=GB, crosses=True))
    found = cost({"update": [learning]}, 1, messages)
    assert found.seconds["update"] == 24 * 3
    assert found.seconds["traffic"] == 6 * (2 * 5 + 4 - 12) + 6 * 10  # what goes between machines nothing hides
    assert found.sent["gathers"] == 6 * 2 * 5 * GB
    assert found.sent["scatters"] == 6 * 4 * GB
    assert found.sent["sums"] == 6 * GB


def test_rows_of_two_optimizer_steps_share_no_call():
    messages = sent(gather=Message(bytes=GB))
    assert cost({"update": [rollout()]}, 6, messages).sent["gathers"] == 5 * GB  # four rows in one call
    assert cost({"update": [rollout(parts=2)]}, 6, messages).sent["gathers"] == 2 * 5 * GB


def test_parts_have_as_many_rows_as_there_are():
    """Five rows in two parts are calls of 3 and of 2, and of at most 2 one of 1 more."""
    assert sorted(rollout(units=5, width=1, parts=2, sweeps=1).sizes(1)) == [(1, 2), (1, 3)]
    assert sorted(rollout(units=5, width=1, parts=2, sweeps=1, rows=2).sizes(1)) == [(1, 1), (1, 2), (1, 2)]
    assert rollout(units=0, parts=2).sizes(1) == []


def test_gradients_of_what_is_whole_are_summed_once_an_optimizer_step():
    found = cost({}, 4, sent(step=Message(bytes=GB)))
    assert found.seconds["traffic"] == 2 * 1
    assert found.sent == {"gathers": 0, "scatters": 0, "sums": 2 * GB, "rewards": 3 * (PICKLED + 8 * 10 * 6)}


def test_more_trees_are_more_calls_but_for_the_evaluation():
    calls = {"rollout": [rollout()], "evaluate": [rollout(units=7, width=1)]}
    more = work(**calls).times(2.5)
    assert (more.samples, more.trees) == (60, 30)
    assert more.calls["rollout"][0].units == 30
    assert more.calls["evaluate"][0].units == 7


@pytest.mark.parametrize(
    ("model", "forwards"),
    [({"lora": {}}, 2), ({"lora": None}, 3), ({"lora": {}, "gradient_checkpointing": True}, 3)],
)
def test_forward_passes_of_a_call_with_gradient(model, forwards):
    assert forwards_of(config.validate({"model": {"path": "shapes", **model}})) == forwards
