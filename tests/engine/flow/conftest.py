"""A tiny policy with adapters, and an engine of the same model."""

import copy

import fake_engine
import pytest
import runs
from replayed import adapted

from flowgrpo.flow.pipeline.loading.load import load_pipeline
from flowgrpo.flow.pipeline.policy import DiffusersPolicy

STARTED = {**runs.CALL, "num_inference_steps": 4}
CALL = {name: value for name, value in STARTED.items() if name != "max_sequence_length"}


@pytest.fixture(scope="session")
def pipe(tiny_model):
    """The model, of which each test takes copies."""
    return load_pipeline(str(tiny_model))


@pytest.fixture
def engine(pipe):
    """An engine that was started with the sizes of tests."""
    return fake_engine.FakeEngine(DiffusersPolicy(copy.deepcopy(pipe), STARTED))


@pytest.fixture
def url(engine):
    """Its address."""
    with fake_engine.serving(engine) as (address, _):
        yield address


@pytest.fixture
def policy(pipe):
    """The model as a policy that calls have been made of."""
    made = DiffusersPolicy(copy.deepcopy(pipe), STARTED)
    assert made.sigmas
    return made


@pytest.fixture
def weights(policy):
    """Adapters of it, whose alpha is not their rank, that change what it computes."""
    return adapted(policy, alpha=6, size=0.1)
