"""A tiny random language model that is saved to disk, and a small run on it."""

import json

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from flowgrpo import config

WORDS = ["<pad>", "<mask>", "<end>", *"abcdefgh"]
REWARD = """
def vowels(texts, prompts, **columns):
    return [sum(c in "ae" for c in text) / 4 for text in texts]


def vowels_but_of_bcd(texts, prompts):
    return [None if p == "bcd" else sum(c in "ae" for c in t) / 4 for t, p in zip(texts, prompts)]


def solved(texts, prompts, completion):
    return [float(text[:4] == right) for text, right in zip(texts, completion)]


def polite(texts, prompts):
    return [2.0] * len(texts)


def own(texts, prompts):
    assert len(set(prompts)) == 1
    return [float(len(set(texts)))] * len(texts)


own.group_wise = True


def of_nothing(texts, prompts):
    return [None] * len(texts)


def broken(texts, prompts):
    return [1.0]
"""


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A folder with a random two-layer Llama of eleven tokens and a tokenizer of letters."""
    folder = tmp_path_factory.mktemp("tiny")
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", mask_token="<mask>", eos_token="<end>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 2, "mask_token_id": 1}
    LlamaForCausalLM(LlamaConfig(**sizes, **tokens, max_position_embeddings=128)).save_pretrained(folder)
    return folder


@pytest.fixture
def settings(model, tmp_path):
    """A function of overrides that gives the configuration of a small run."""
    (tmp_path / "mine.py").write_text(REWARD)
    rows = [
        {"prompt": prompt, "completion": prompt[:1] * 4, "letters": [prompt[:1]]}
        for prompt in ("ab", "bcd", "c", "dab")
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    written = {
        "kind": "mdlm",
        "model": {"path": str(model), "length": 4, "lora": None},
        "prompts": dict.fromkeys(("train", "eval"), str(tmp_path / "rows.jsonl")),
        "rewards": [{"use": f"{tmp_path / 'mine.py'}:vowels"}],
        "train": {
            "iterations": 2, "groups": 4, "group_size": 8, "updates": 2, "learning_rate": 0.003, "micro_batch": 32,
        },
        "eval": {"every": 2, "save": 2},
        "run": {"dir": str(tmp_path / "runs"), "checkpoint": {"every": 1}},
    }  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(written))
    return lambda **overrides: config.load(path, {key.replace("__", "."): value for key, value in overrides.items()})
