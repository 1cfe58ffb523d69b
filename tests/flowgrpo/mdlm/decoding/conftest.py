"""A random transformer that several tests decode with, and single steps of a decode."""

from dataclasses import replace

import pytest
import torch
from predictors import MASK, PAD, llama

from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from flowgrpo.mdlm.decoding.tokens.step import DecodeStep, Draws


@pytest.fixture(scope="module")
def predictor():
    return MaskPredictor(llama(), MASK, PAD)


@pytest.fixture
def first_step():
    """A function of a decoder and canvases (R, L) without a prompt that gives the first step of their only block."""

    def step(decoder, ids, **changes):
        row, width = torch.arange(len(ids)), ids.shape[1]
        first = DecodeStep(
            frame=decoder.frame,
            row=row,
            index=row * 0,
            in_block=0,
            block_masks=row * 0 + width,
            block=0,
            start=0,
            open=ids == MASK,
            ids=ids,
            attention_mask=ids >= 0,
            prompt=0,
            draws=Draws(range(len(ids)), width),
        )
        return replace(first, **changes)

    return step
