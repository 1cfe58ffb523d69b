"""The calls of an iteration by which its seconds on GPUs are planned."""

from collections import Counter
from types import SimpleNamespace

import pytest

from flowgrpo.config import load
from flowgrpo.flow.planning.iteration_cost import work
from flowgrpo.flow.planning.plan import plan


@pytest.mark.parametrize(("preset", "forwards"), [("awm_fast", 0), ("nft", 2)])
def test_the_update_on_final_samples_has_as_many_calls_of_each_size_as_its_plan(preset, forwards):
    """48 samples with 6 or 9 draws in calls of 32, and those of two other policies."""
    config = load("configs/shapes.yaml", {"algorithm.preset": preset})
    sampling = SimpleNamespace(operations=1, launches=1, calls=1, decode_operations=1)
    trial = SimpleNamespace(rollout=sampling, evaluate=None, shapes={}, width=1, trained=1)
    planned = plan(config)
    learning, others = work(SimpleNamespace(graphs=(), config=config, trial=trial), planned).calls["update"]
    rows = planned["geometry"]["trained_edges"]
    sizes = Counter()
    for count, size in learning.sizes(1):
        sizes[size] += count
    assert sizes == Counter({32: rows // 32} | ({rows % 32: 1} if rows % 32 else {}))
    assert sum(sizes.values()) == planned["geometry"]["update_batches"]
    assert sum(count * size for count, size in others.sizes(1)) == forwards * rows
