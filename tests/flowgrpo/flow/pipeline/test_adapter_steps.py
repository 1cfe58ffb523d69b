"""Adapters on a part of the schedule: which steps they act on, to the bit."""

import json
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import cases
from peft.tuners.tuners_utils import BaseTunerLayer
from zoo import SPECIMENS, numbers

import flowgrpo
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline import adapter_steps
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.training.weights.trained_weights import Weights, lora_config


def switch_layers(policy, on):
    """Switch all adapters of a policy's networks."""
    for network in policy.modules.values():
        for layer in network.modules():
            if isinstance(layer, BaseTunerLayer):
                layer.enable_adapters(on)


def specimen_policy(name, steps):
    """A policy of a tiny pipeline, its samples before it had adapters, its weights, and rows."""
    specimen = SPECIMENS[name]
    policy = DiffusersPolicy(specimen.build(), {**specimen.call, "num_inference_steps": steps})
    rows = specimen.rows[:2]
    if name not in CLASSES:
        policy.check(rows)  # which finds how final states are decoded
    policy.start(rows)
    base = numbers(policy.generate(rows))
    weights = Weights(policy.modules, lora_config(2, 4.0, "auto", policy.modules))
    generator = torch.Generator().manual_seed(0)
    for name, p in weights.named.items():
        if "lora_B" in name:
            p.data.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return policy, base, weights, rows


def limited(policy, weights, rows, part):
    """Samples with adapters on a part of the schedule."""
    with policy.limited(part, weights.enable_training):
        return numbers(policy.generate(rows))


def by_hand(policy, rows, first, end):
    """Samples of slices: the steps from first to end with adapters, the others without."""
    state = policy.start(rows)
    for begin, stop, on in ((0, first, False), (first, end, True), (end, len(policy.sigmas) - 1, False)):
        if begin < stop:
            switch_layers(policy, on)
            state = policy.finish(state, policy.sigmas[begin : stop + 1], rows)
    switch_layers(policy, True)
    return numbers(policy.decode(state, rows))


CLASSES = (
    "StableDiffusion3Pipeline",  # guided in one call
    "QwenImagePipeline",  # guided in two
    "WanPipeline (2.2)",  # a network for the noisy steps, another for the rest
    "ChromaImg2ImgPipeline",  # begins at a later step
    "LTX2Pipeline",  # two schedulers
)
TABLE = json.loads((Path(flowgrpo.__file__).parent / "data" / "models.json").read_text())
KEEPING = ("Flux2KleinKVPipeline", "QwenImage21Pipeline")  # keys and values of the first step
MORE = [
    name
    for row in TABLE
    if row["certified"]
    and row["class"] not in KEEPING
    and (name := row["class"] + (f" ({row['variant']})" if row["variant"] else "")) not in CLASSES
]


@pytest.mark.parametrize("name", cases((*CLASSES, *MORE), {*CLASSES} - {"QwenImagePipeline"}))
def test_a_part_equals_slices_with_adapters_and_without_to_the_bit(name):
    policy, base, weights, rows = specimen_policy(name, 8 if name == "ChromaImg2ImgPipeline" else 4)
    whole, count = numbers(policy.generate(rows)), len(policy.sigmas) - 1
    assert not torch.equal(whole, base)
    assert torch.equal(limited(policy, weights, rows, [0.0, 1.0]), whole)
    assert torch.equal(limited(policy, weights, rows, [0.0, 0.0]), base)
    half = limited(policy, weights, rows, [0.0, 0.5])
    later = limited(policy, weights, rows, [0.5, 1.0])
    assert not torch.equal(half, whole)
    assert not torch.equal(half, base)
    if not policy.pins:  # otherwise slices of several steps are not walked
        # Decoding a state that was walked in slices is exact, except that LTX's pipelines with conditions round otherwise.
        gap = float((whole - by_hand(policy, rows, 0, count)).abs().max())
        assert gap < 1e-5 if name in ("LTXConditionPipeline", "LTXImageToVideoPipeline") else gap == 0
        assert float((half - by_hand(policy, rows, 0, (count + 1) // 2)).abs().max()) <= 2 * gap
        assert float((later - by_hand(policy, rows, (count + 1) // 2, count)).abs().max()) <= 2 * gap
    assert torch.equal(numbers(policy.generate(rows)), whole)  # they act again


class Network(torch.nn.Module):
    """Notes whether adapters act when it is called."""

    def __init__(self):
        super().__init__()
        self.on, self.seen = True, []

    def forward(self):
        self.seen.append(self.on)


def stub(count, begin=None):
    """A pipeline with a network, and its call: two calls of the network at each step from `begin` on."""
    network = Network()
    scheduler = SimpleNamespace(timesteps=list(range(count)), begin_index=begin, step_index=None)
    pipe = SimpleNamespace(components={"transformer": network}, scheduler=scheduler)

    def call():
        scheduler.step_index = None
        for index in range(begin or 0, count):
            network()
            network()
            scheduler.step_index = index + 1
        return network.seen[::2]

    return pipe, network, call


@pytest.mark.parametrize("count", [1, 3, 7, 10, 28, 50])
@pytest.mark.parametrize("part", ["0:0.6", "0:0.3", "0.1:0.7", "0.35:1", "0:1", "1:1", "0.29:0.3"])
def test_step_k_of_n_is_taken_with_adapters_from_first_to_below_the_end(count, part):
    first, end = map(Fraction, part.split(":"))
    pipe, network, call = stub(count)
    with adapter_steps.limited(pipe, [float(first), float(end)], lambda on: setattr(network, "on", on)):
        seen = call()
    assert seen == [first <= Fraction(k, count) < end for k in range(count)]
    assert network.seen[::2] == network.seen[1::2]
    assert network.on


def test_mixgrpo_s_30_of_50_steps_are_the_part_from_0_to_0_6():
    pipe, network, call = stub(50)
    with adapter_steps.limited(pipe, [0.0, 0.6], lambda on: setattr(network, "on", on)):
        assert call() == [True] * 30 + [False] * 20


def test_steps_that_a_pipeline_leaves_out_do_not_count():
    pipe, network, call = stub(10, begin=6)
    with adapter_steps.limited(pipe, [0.0, 0.5], lambda on: setattr(network, "on", on)):
        assert call() == [True, True, False, False]


def test_a_pipeline_that_does_not_tell_its_steps_is_refused():
    pipe, _, call = stub(4)
    pipe.scheduler = SimpleNamespace(timesteps=[0] * 4, begin_index=0, step_index=None)  # another than the call moves
    with (
        pytest.raises(InputError, match="^--adapter-steps: SimpleNamespace counts its steps where nobody sees it"),
        adapter_steps.limited(pipe, [0.0, 0.5], lambda on: None, "--adapter-steps"),
    ):
        call()


def test_keys_and_values_of_the_trained_model_are_not_taken_over_by_the_base():
    policy, base, weights, rows = specimen_policy("QwenImage21Pipeline", 4)
    assert torch.equal(limited(policy, weights, rows, [0.0, 0.0]), base)
    with pytest.raises(
        InputError, match="^eval.adapter_steps: QwenImage21Pipeline keeps keys and values of its first step"
    ):
        limited(policy, weights, rows, [0.0, 0.5])
    with policy.call_overrides(use_kv_cache=False):
        half = limited(policy, weights, rows, [0.0, 0.5])
        assert torch.equal(half, by_hand(policy, rows, 0, 2))


def test_adapters_act_again_after_a_call_that_failed():
    policy, _, weights, rows = specimen_policy("StableDiffusion3Pipeline", 2)
    whole = numbers(policy.generate(rows))
    policy.modules["transformer"].register_forward_hook(fail := Fail())
    with pytest.raises(RuntimeError, match="full"), policy.limited([0.0, 0.0], weights.enable_training):
        policy.generate(rows)
    fail.on = False
    assert torch.equal(numbers(policy.generate(rows)), whole)


class Fail:
    """A hook that raises."""

    on = True

    def __call__(self, *_):
        if self.on:
            raise RuntimeError("full")
