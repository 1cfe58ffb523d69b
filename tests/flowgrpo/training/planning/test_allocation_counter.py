"""Operations that are counted while functions run, by hand."""

import pytest
import torch
import transformers
from torch import nn

from flowgrpo.training.planning.allocation_counter import AllocationCounter
from flowgrpo.training.planning.meta_networks import MetaNetworks, build_on_meta

ENDS = torch.tensor([2, 4, 6, 8], dtype=torch.int32)
ATTENTION = torch.nn.functional.scaled_dot_product_attention


@pytest.mark.parametrize(
    ("call", "operations"),
    [
        (lambda: torch.ones(3, 5) @ torch.ones(5, 7), 2 * 3 * 5 * 7),
        (lambda: nn.Linear(5, 7)(torch.ones(2, 3, 5)), 2 * 2 * 3 * 5 * 7),
        (lambda: nn.Conv2d(2, 4, 3, padding=1)(torch.ones(1, 2, 8, 8)), 2 * 4 * 8 * 8 * 2 * 9),
        (lambda: ATTENTION(*(torch.ones(2, 4, 16, 8) for _ in range(3))), 2 * 2 * (2 * 4 * 16 * 16 * 8)),
        (
            lambda: ATTENTION(torch.ones(1, 4, 16, 8), *(torch.ones(1, 2, 32, 8) for _ in range(2)), enable_gqa=True),
            2 * 2 * (4 * 16 * 32 * 8),
        ),
        (lambda: torch.ones(8, 8).softmax(-1) + 1, 0),
        # Rows go through one of four experts each.
        (
            lambda: torch._grouped_mm(torch.ones(8, 16).bfloat16(), torch.ones(4, 16, 32).bfloat16(), offs=ENDS),
            2 * 8 * 16 * 32,
        ),
    ],
)
def test_products_convolutions_and_attention_are_counted(call, operations):
    live = AllocationCounter()
    with torch.no_grad(), live:
        torch.ones(3, 5) @ torch.ones(5, 7)
        live.restart()  # counts anew
        call()
    assert live.operations == operations


LLAMA = transformers.LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=48, num_hidden_layers=5, num_attention_heads=2
)


def test_blocks_that_are_not_run_and_repeated_calls_are_counted():
    layer, launches = 2 * 8 * 16 * (4 * 16 + 3 * 48) + 2 * 2 * 8 * 8 * 16, set()
    for run_all in (True, False):
        networks = MetaNetworks()
        made = build_on_meta(lambda: transformers.LlamaModel(LLAMA), torch.float32)
        networks.empty(made, run_all=run_all)
        with torch.no_grad(), networks.phase() as live:
            for calls in (1, 2):
                made(inputs_embeds=torch.ones(1, 8, 16), use_cache=False)
                assert live.operations == calls * 5 * layer
                launches.add(live.launches / calls)
    (each,) = launches
    assert each > 5 * 9  # seven products, attention and a norm in each layer
