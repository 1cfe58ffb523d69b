"""A random transformer that several tests decode with."""

import pytest
from predictors import MASK, PAD, llama

from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor


@pytest.fixture(scope="module")
def predictor():
    return MaskPredictor(llama(), MASK, PAD)
