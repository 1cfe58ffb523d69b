"""Pretrain the embedded language model: a small bidirectional transformer that fills in masked characters.

    python scripts/make_digits_model.py --out flowgrpo/models/digits

As LLaDA, it is transformers' Llama with `is_causal` off; a token is a character. It learns Countdown, 4 x 4 Sudoku and
integer arithmetic (`flowgrpo/data/generators/tasks.py`, split `train`) from prompts and solutions masked at a rate
t ~ U(0, 1). Answers are padded to `LENGTH` with end tokens, which are learnt too. Unlike in LLaDA's loss, masked tokens
have equal weights for all t. The averaged weights are written as bfloat16.

The model is imperfect on purpose: training stops early, and in two short passes some answers are lazy: a Sudoku is
copied with empty cells, a Countdown uses numbers that were not given. Reinforcement can correct this in minutes.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from flowgrpo.data.generators.tasks import ALPHABET, LONGEST_PROMPT, TASKS, draw, problems
from flowgrpo.mdlm.decoding.decode import decode
from flowgrpo.mdlm.decoding.decoders import build
from flowgrpo.mdlm.models.load import load_predictor
from rewards.texts.text import solved

LENGTH = 20  # tokens of an answer
BATCH = 128
PASSES = (  # steps, factor of the learning rates, share of each task in a batch, share of lazy answers in a task
    (2400, 1.0, {"countdown": 0.45, "sudoku": 0.1, "arithmetic": 0.45}, {}),
    (400, 0.5, {"countdown": 0.5, "sudoku": 0.2, "arithmetic": 0.3}, {"countdown": 0.3, "sudoku": 0.6}),
    (200, 0.3, {"countdown": 0.6, "sudoku": 0.2, "arithmetic": 0.2}, {"sudoku": 0.65}),
)
HIDDEN_PROMPTS = 0.2  # share of rows with masked prompt tokens, as in diffu-GRPO's views
PROMPT_RATE = 0.15


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single characters, padded on the left."""
    words = ["<pad>", "<mask>", "<end>", "<unknown>", *ALPHABET]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unknown>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "mask_token": "<mask>", "eos_token": "<end>", "unk_token": "<unknown>"}
    form = {"padding_side": "left", "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names, **form)


def model(words: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return the untrained bidirectional transformer."""
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        is_causal=False,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        mask_token_id=words.mask_token_id,
    )
    return LlamaForCausalLM(config)


class Batches:
    """Generator of random batches of problems and their masks."""

    def __init__(self, words: PreTrainedTokenizerFast, seed: int):
        self.words, self.rng = words, np.random.default_rng(seed)

    def __call__(self, shares: dict[str, float], lazy: dict[str, float]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and a bool mask of the answers, both (BATCH, LONGEST_PROMPT + LENGTH)."""
        tasks = self.rng.choice(list(shares), BATCH, p=list(shares.values()))
        rows = [draw(str(task), "train", self.rng) for task in tasks]
        ids = torch.full((BATCH, LONGEST_PROMPT + LENGTH), self.words.eos_token_id)
        ids[:, :LONGEST_PROMPT] = self.words.pad_token_id
        for row, canvas in zip(rows, ids, strict=True):
            solution = self.lazy(row) if self.rng.random() < lazy.get(row["task"], 0) else row["completion"]
            prompt, answer = (self.words(text).input_ids for text in (row["prompt"], solution))
            canvas[LONGEST_PROMPT - len(prompt) : LONGEST_PROMPT] = torch.tensor(prompt)
            canvas[LONGEST_PROMPT : LONGEST_PROMPT + len(answer)] = torch.tensor(answer)
        return ids, (torch.arange(LONGEST_PROMPT + LENGTH) >= LONGEST_PROMPT).expand_as(ids)

    def lazy(self, row: dict[str, Any]) -> str:
        """Return a lazy answer: a Sudoku with empty cells, a Countdown with other numbers; else the solution."""
        if row["task"] == "sudoku":
            return row["prompt"].removeprefix("sudoku ").removesuffix(":")
        if row["task"] == "countdown" and row["target"] > 1:
            part = int(self.rng.integers(1, row["target"]))
            return f"{row['target'] - part}+{part}"
        return row["completion"]

    def hidden(self, ids: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
        """Return which tokens are masked, bool (BATCH, T); answers at evenly spread rates t, and parts of some prompts."""
        rate = (torch.randperm(BATCH)[:, None] + torch.rand(BATCH, 1)) / BATCH
        blind = torch.rand(BATCH, 1) < HIDDEN_PROMPTS
        rate = torch.where(answer, rate, PROMPT_RATE * blind)
        return (torch.rand(ids.shape) < rate) & (ids != self.words.pad_token_id)


def train(network: LlamaForCausalLM, batches: Batches, steps: int, rate: float, *mixture: Any) -> None:
    """Train to predict masked tokens of `batches(*mixture)`; at the end the weights are set to their moving average.

    Muon orthogonalises the updates of the layers' matrices; AdamW trains the embedding and the norms.
    """
    words = batches.words
    parameters = list(network.parameters())
    average = [p.detach().clone() for p in parameters]
    matrices = [p for p in network.model.layers.parameters() if p.ndim == 2]
    others = [p for p in parameters if all(p is not matrix for matrix in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=rate * 4e-3, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate * 2e-3, betas=(0.9, 0.99), weight_decay=0.01),
    ]
    factor = lambda i: min((i + 1) / 100, 0.5 * (1 + np.cos(np.pi * i / steps)) + 0.01)  # noqa: E731
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, factor) for optimizer in optimizers]
    compiled = torch.compile(network)
    started, mean = time.time(), 0.0
    for step in range(1, steps + 1):
        ids, answer = batches(*mixture)
        hidden = batches.hidden(ids, answer)
        seen = ids != words.pad_token_id
        mask = torch.zeros(ids.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None, None, :]
        with torch.autocast("cpu", torch.bfloat16):
            logits = compiled(
                ids.masked_fill(hidden, words.mask_token_id),
                attention_mask=mask.expand(-1, 1, ids.shape[1], -1),
                position_ids=(seen.long().cumsum(1) - 1).clamp(min=0),
            ).logits
        asked = hidden & answer
        value = torch.nn.functional.cross_entropy(logits[asked].float(), ids[asked])
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        with torch.no_grad():
            for slow, p in zip(average, parameters, strict=True):
                slow.lerp_(p, 0.005)
        mean += (value.item() - mean) / min(step, 100)
        if step % 100 == 0 or step == steps:
            print(f"{step}/{steps} loss {mean:.4f} {time.time() - started:.0f} s", flush=True)
    with torch.no_grad():
        for slow, p in zip(average, parameters, strict=True):
            p.copy_(slow)


def accuracy(path: Path, task: str, steps: int, count: int = 256) -> float:
    """Return the fraction of held-out problems solved by low-confidence decoding at temperature 0."""
    predictor, words = load_predictor(str(path))
    rows = problems(task, "eval", count)
    prompts = words([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    decoder = build({"name": "low_confidence", "steps": steps}, LENGTH, words.eos_token_id)
    options = {"attention_mask": prompts.attention_mask, "micro_batch": 128}
    rollout = decode(predictor, prompts.input_ids, decoder, [(i,) for i in range(count)], **options)
    texts = words.batch_decode(rollout.completion, skip_special_tokens=True)
    columns = {key: [row[key] for row in rows] for key in rows[0] if key != "prompt"}
    return float(np.mean(solved(texts, [row["prompt"] for row in rows], **columns)))


def main() -> None:
    """Train, save, reload and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    words = tokenizer()
    network = model(words)
    batches = Batches(words, arguments.seed)
    for steps, rate, shares, lazy in PASSES:
        train(network, batches, steps, rate, shares, lazy)
    network.to(torch.bfloat16).save_pretrained(arguments.out)
    words.save_pretrained(arguments.out)
    for task in TASKS:
        found = ", ".join(f"{accuracy(arguments.out, task, steps):.3f} in {steps}" for steps in (20, 10, 5))
        print(f"{task}: held-out accuracy {found} steps")


if __name__ == "__main__":
    main()
