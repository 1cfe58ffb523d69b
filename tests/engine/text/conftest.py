"""The embedded model with adapters, and an engine of it."""

import fake_engine
import pytest
import torch
from fake_text_engine import FakeTextEngine

from flowgrpo.config import validate
from flowgrpo.mdlm.setup import policy_and_weights

BLOCKS = {"name": "low_confidence", "steps": 10, "region": {"block_length": 4}}


@pytest.fixture
def engine():
    return FakeTextEngine(BLOCKS)


@pytest.fixture
def url(engine):
    """Its address."""
    with fake_engine.serving(engine) as (address, _):
        yield address


@pytest.fixture
def settings():
    return validate({"kind": "mdlm", "model": {"path": "digits", "lora": {"rank": 2, "alpha": 6}}})


@pytest.fixture
def learner(settings):
    """The policy, and its adapters, whose alpha is not their rank, that change what it computes."""
    torch.manual_seed(1)
    policy, weights = policy_and_weights(settings, torch.device("cpu"))
    with torch.no_grad():
        for p in weights.parameters:
            p.add_(0.1 * torch.randn_like(p))
    return policy, weights
