"""The benchmark of single levers, on short rollouts of few rows."""

from contextlib import nullcontext
from dataclasses import replace

import pytest


@pytest.fixture
def bench(script, monkeypatch):
    bench = script("bench_levers")
    few_steps = {"num_inference_steps": 3}
    shapes = replace(bench.flow_sizes.SIZES["shapes"], rows=(2,), group=2, call=few_steps)
    monkeypatch.setattr(
        bench.flow_sizes, "SIZES", {"shapes": shapes, "wide": replace(shapes, lora={"rank": 2, "alpha": 4})}
    )
    return bench


def test_each_lever_is_taken_out_and_put_back(bench):
    found = bench.rollouts(1)
    places = ["as it is", *(f"without {name}" for name in ("device", "embeddings", "latents"))]
    assert list(found) == [f"shapes, 2 rows: rollout / transformer in it, {place}" for place in places]
    assert all(ratio["median"] > 1 for ratio in found.values())
    (ratio,) = bench.references(1).values()
    assert ratio["median"] > 0


@pytest.mark.parametrize("name", ["device", "embeddings", "latents"])
def test_a_lever_that_is_taken_out_does_nothing(bench, name, monkeypatch):
    policy, _ = bench.begun(bench.flow_sizes.SIZES["shapes"])
    row = bench.bench_flow.Row("a red circle", 1)
    state, sigma = policy.start([row]), policy.sigmas[0]
    policy.velocity(state, sigma, [row])
    done = {"device": 0, "embeddings": 0, "latents": 0}

    def counted(name, real):
        def called(*arguments, **given):
            done[name] += 1
            return real(*arguments, **given)

        return called

    base = type(policy.pipe).__mro__[1]
    monkeypatch.setattr(base, "_execution_device", property(counted("device", base._execution_device.fget)))
    embeddings, latents = policy.walk.embeddings, policy.walk.latents
    monkeypatch.setattr(embeddings, "_batch", counted("embeddings", embeddings._batch))
    real = latents.arguments
    monkeypatch.setattr(latents, "arguments", lambda: real() or counted("latents", dict)())
    for out in (False, True, False):
        done.update(dict.fromkeys(done, 0))
        with bench.without(name, policy) if out else nullcontext():
            policy.velocity(state, sigma, [row])
        assert bool(done[name]) == out


def test_a_lever_that_changes_samples_ends_it(bench, monkeypatch):
    def other(policy):
        projection = policy.walk.modules["transformer"].pos_embed.proj
        return projection, "bias", bench.torch.nn.Parameter(projection.bias + 1)

    monkeypatch.setattr(bench, "LEVERS", {"other": other})
    with pytest.raises(SystemExit, match="without other: samples differ"):
        bench.rollouts(1)
