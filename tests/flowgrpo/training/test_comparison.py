"""Comparison of the samples of all processes."""

import pytest
from field import lines, settings, trainer

from flowgrpo.errors import InputError
from flowgrpo.flow.planning.iteration_forecast import predict_cost
from flowgrpo.training.distributed.collectives import Collectives


@pytest.mark.parametrize("baseline", ["cumulative", "quantile"])
def test_rewards_are_remembered_alike_in_any_order_of_processes(tmp_path, monkeypatch, baseline):
    """With `train.split: samples` processes share groups, so each has some of the samples of a group."""
    found = []
    for order in (1, -1):
        run = trainer(settings(tmp_path / str(order), train__split="samples", algorithm__baseline=baseline))
        batch = run.rollout(0, run.groups(0))

        def gather(_, parts, order=order):
            [(units, rewards, members, lost)] = parts
            places = [*range(0, len(members), 3), *range(1, len(members), 3), *range(2, len(members), 3)][::order]
            return [(units, rewards[places], [members[i] for i in places], lost)]

        with monkeypatch.context() as patch:
            patch.setattr(Collectives, "gather_shards", gather)
            found.append((run.compare(batch).line, run.prompt_stats.seen, run.memory))
    assert found[0] == found[1]
    assert len(found[0][1]) == 4


def test_a_selection_across_the_batch_grows_during_the_run(tmp_path):
    """From a quarter of the samples to all, in four iterations; the plan of each iteration counts them, too."""
    select = {"rule": "max_variance", "across": "batch", "fraction": 0.25, "end": 1.0}
    chosen = settings(tmp_path, train__select=select, train__iterations=4, train__updates=1)
    run = trainer(chosen)
    run.run()
    left_out = [line["groups/left_out_fraction"] for line in lines(run)]
    assert left_out == [0.75, 0.5, 0.25, 0]
    trained = [line["cost/trained_edges"] for line in lines(run)]
    assert trained == [trained[3] * share / 4 for share in (1, 2, 3, 4)]
    assert trained == [predict_cost(chosen, 6, iteration).trained_edges for iteration in range(4)]


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"train__select": {"across": "batch", "statistics": "kept"}}, r"^train\.select\.statistics: .* take all$"),
        (
            {"train__select": {"across": "batch"}, "algorithm__preset": "dgpo"},
            r"^train\.select\.across: group_sigmoid compares the samples of a group, take sets$",
        ),
    ],
)
def test_selections_across_the_batch_that_cannot_be(tmp_path, choices, words):
    with pytest.raises(InputError, match=words):
        settings(tmp_path, **choices)
