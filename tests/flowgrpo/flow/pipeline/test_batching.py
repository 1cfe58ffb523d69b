"""Which rows come into one call, by what a pipeline can do."""

from dataclasses import dataclass

import pytest
import torch

from flowgrpo.data.prompts import Row
from flowgrpo.flow.pipeline.batching import Capabilities, cut, join
from flowgrpo.flow.pipeline.inputs.prompt_embeddings import EmbeddingShape


@dataclass
class Lengths:
    """Stands for a walk: embeddings are as long as the prompt, and every column is a condition."""

    masked: bool

    def encode(self, row):
        return (EmbeddingShape(((1, len(row.prompt), 2), (1, len(row.prompt))), self.masked, 0),)

    def conditions_key(self, row):
        return repr(row.columns)


ROWS = [Row("aa", 0), Row("bb", 1), Row("ccc", 2), Row("d", 3), Row("e", 4, {"image": "x"})]


@pytest.mark.parametrize(
    ("masked", "can", "sizes"),
    [
        (True, Capabilities(), [4, 1]),  # another image is another call
        (False, Capabilities(), [2, 1, 1, 1]),  # nothing says what is padding
        (True, Capabilities(pads_prompts=False), [2, 1, 1, 1]),
        (True, Capabilities(max_batch=3), [3, 1, 1]),
        (True, Capabilities(pads_prompts=False, max_batch=1), [1, 1, 1, 1, 1]),
    ],
)
def test_rows_are_cut_where_one_call_cannot_take_them(masked, can, sizes):
    state = (torch.arange(5), torch.arange(10).view(5, 2))
    batches = cut(Lengths(masked), can, ROWS, state)
    assert [len(rows) for rows, _ in batches] == sizes
    assert [row for rows, _ in batches for row in rows] == ROWS
    assert all(torch.equal(a, b) for a, b in zip(join([part for _, part in batches]), state, strict=True))
