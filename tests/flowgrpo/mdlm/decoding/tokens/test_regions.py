"""Where a step may commit."""

import pytest
import torch
from predictors import random_table

from flowgrpo.mdlm.decoding.decode import decode
from flowgrpo.mdlm.decoding.decoders import build
from flowgrpo.mdlm.decoding.tokens.regions import ascending, ascending_sizes, even, fit_blocks

PROMPT = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8]])
SEEDS = [(0, "decode", group) for group in range(3)]


@pytest.mark.parametrize("length", [1, 2, 3, 16, 100, 128, 256])
def test_steps_of_ascending_size_add_up(length):

    sizes = [size for block in ascending_sizes(length) for size in block]
    assert sum(sizes) == length
    assert sizes[:-1] == [2**i for i in range(len(sizes) - 1)]
    known = {100: [1, 2, 4, 8, 16, 69], 128: [1, 2, 4, 8, 16, 32, 65], 256: [1, 2, 4, 8, 16, 32, 64, 129]}
    assert sizes == known.get(length, sizes)
    if length == 128:
        assert ascending_sizes(128, 4) == ((1, 2, 4, 8), (16,), (32,), (65,))
        assert ascending(128, 4).ends == (15, 31, 63, 128)


def test_a_window_moves_with_the_first_mask():
    decoder = build({"name": "random", "region": {"window": 2}}, 8)
    step_map = decode(random_table(12), PROMPT, decoder, SEEDS).step_map
    for row in step_map.tolist():
        for s in range(8):
            masks = [i for i in range(8) if row[i] >= s]
            assert row.index(s) < masks[0] + 2
    assert not (step_map == torch.arange(8)).all()


WHOLE = [(0, 4), (4, 8), (8, 10)]


@pytest.mark.parametrize(
    ("prompt", "told"),
    [([0, 4], [WHOLE, WHOLE]), ([3, 5], [[(0, 1), (1, 5), (5, 9), (9, 10)], [(0, 3), (3, 7), (7, 10)]])],
)
def test_blocks_of_a_model_begin_where_the_prompt_s_end(prompt, told):
    """Of 4 tokens, counted from the prompt's first; a prompt of 3 has one token of its block left for the answer."""
    parts = fit_blocks(even(10), 4, "decoder.region").parts(torch.tensor(prompt))
    for row, blocks in enumerate(told):
        assert [(int(start[row]), int(end[row])) for start, end in parts if start[row] < end[row]] == blocks
