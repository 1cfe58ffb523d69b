"""A tiny policy with adapters, and an engine of the same model."""

import fake_engine
import pytest
import runs
import torch

from flowgrpo.flow.pipeline.loading import load_policy
from flowgrpo.training.weights import Weights, lora_config

CALL = {name: value for name, value in runs.CALL.items() if name != "max_sequence_length"}


@pytest.fixture
def engine(tiny_model):
    """An engine that was started with the sizes of tests."""
    return fake_engine.FakeEngine(tiny_model, **runs.CALL)


@pytest.fixture
def url(engine):
    """Its address."""
    with fake_engine.serving(engine) as (address, _):
        yield address


@pytest.fixture
def policy(tiny_model):
    """The model as a policy that calls have been made of."""
    made = load_policy(str(tiny_model), "float32", runs.CALL, torch.device("cpu"))
    assert made.sigmas
    return made


@pytest.fixture
def weights(policy):
    """Adapters of it, whose alpha is not their rank, that change what it computes."""
    torch.manual_seed(1)
    made = Weights(policy.modules, lora_config(2, 6, "auto", policy.modules))
    with torch.no_grad():
        for p in made.parameters:
            p.add_(0.1 * torch.randn_like(p))
    return made
