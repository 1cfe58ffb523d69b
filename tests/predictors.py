"""Predictors small enough to be exact: tables of neighbours, and random transformers."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor

MASK, PAD, VOCAB = 15, 14, 16


def table(toy: dict) -> MaskPredictor:
    """Build the toy predictor of the vectors: a bias of the position, and a table for each neighbour."""
    bias, left, right = (
        torch.tensor(toy[key], dtype=torch.float64) for key in ("position_bias", "left_table", "right_table")
    )

    def model(ids):
        logits = bias[: ids.shape[1]].repeat(len(ids), 1, 1)
        logits[:, 1:] += left[ids[:, :-1]]
        logits[:, :-1] += right[ids[:, 1:]]
        logits[..., toy["mask_id"]] = -30
        return logits

    return MaskPredictor(model, toy["mask_id"])


def random_table(length: int, seed: int = 0) -> MaskPredictor:
    """Build such a predictor with normal tables of `VOCAB` tokens."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"position_bias": (length, VOCAB), "left_table": (VOCAB, VOCAB), "right_table": (VOCAB, VOCAB)}
    tables = {key: torch.randn(shape, generator=generator).tolist() for key, shape in shapes.items()}
    return table({"mask_id": MASK, **tables})


def llama(layers: int = 2, **options) -> LlamaForCausalLM:
    """Build a random Llama in float64 whose predictions are far from even."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4, vocab_size=VOCAB,
        initializer_range=0.4, max_position_embeddings=128, pad_token_id=PAD, **options,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "initializer_range": 0.4, "max_position_embeddings": 128,
    "pad_token_id": PAD,
}  # fmt: skip


def qwen() -> Qwen2ForCausalLM:
    torch.manual_seed(1)
    return Qwen2ForCausalLM(Qwen2Config(**SMALL)).double().eval()


def qwen3() -> Qwen3ForCausalLM:
    torch.manual_seed(2)
    return Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8)).double().eval()
