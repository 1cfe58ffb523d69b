"""Comparison of the samples of all processes."""

import pytest
from field import settings, trainer

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
