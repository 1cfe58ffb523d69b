"""Measure training iterations of a random language model of LLaDA-8B's shape: peak memory and tokens per second.

    python research/bench_large_text.py [--preset gdpo] [--cache dual] [--gradient-checkpointing] [--micro-batch 4] ...

The sizes are those of LLaDA-8B's config (arXiv 2502.09992), with a LoRA on its attention; smaller ones run anywhere.
Nothing is downloaded, and the model is not saved. Prints a table in Markdown with a row for each iteration. For the
rollout, tokens of the answers are counted; for the update, tokens of all canvases that the model sees. The peak is that
of the GPU, or of this process on a CPU.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from flowgrpo import config
from flowgrpo.data.prompts import Prompt
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from flowgrpo.mdlm.models.gradient_checkpointing import checkpoint_gradients
from flowgrpo.mdlm.planning.plan import predict_cost
from flowgrpo.mdlm.policy import TextPolicy
from flowgrpo.mdlm.trainer import text_loop
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.loop import Loop
from flowgrpo.training.weights.trained_weights import Weights, lora_config
from rewards import Reward

PAD, MASK, END = "<pad>", "<mask>", "<end>"


def llama(options: argparse.Namespace) -> LlamaConfig:
    """Return the config of the model; LLaDA is a Llama without a causal mask."""
    return LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
    )


def network(options: argparse.Namespace, device: torch.device) -> LlamaForCausalLM:
    """Return a random model."""
    with device:
        return LlamaForCausalLM._from_config(llama(options), dtype=getattr(torch, options.dtype)).eval()


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of letters; the other tokens of the model have no text."""
    words = [PAD, MASK, END, *"abcdefghijklmnopqrstuvwxyz"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=PAD))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=PAD, mask_token=MASK, eos_token=END)


def alternating(texts: Sequence[str], prompts: Sequence[str], **columns: Any) -> list[float]:
    """Return 0 and 1 in turn, so that no group has equal rewards."""
    return [float(i % 2) for i in range(len(texts))]


def settings(options: argparse.Namespace, folder: Path) -> RunConfig:
    """Return the configuration of the run."""
    blocks = {"steps": options.steps, "region": {"block_length": options.block_length}, "cache": options.cache}
    return config.validate(
        {
            "kind": "mdlm",
            "model": {"path": str(folder / "model"), "dtype": options.dtype, "length": options.length},
            "algorithm": {"preset": options.preset, "decoder": blocks, "likelihood": {"scope": "canvas"}},
            "train": {
                "iterations": options.iterations,
                "groups": options.groups,
                "group_size": options.group_size,
                "updates": 1,
                "passes": options.passes,
                "learning_rate": 3e-6,
                "micro_batch": options.micro_batch,
                "rollout_batch": options.rollout_batch,
            },
            "run": {"name": "bench", "dir": str(folder), "checkpoint": {"every": options.iterations}},
        }
    )


def loop_of(options: argparse.Namespace, folder: Path) -> Loop:
    """Return the training loop of a run in `folder`, before its first iteration, on the GPU if there is one."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = network(options, accelerator.device).requires_grad_(False)
    if options.gradient_checkpointing:
        checkpoint_gradients(model)
    words = tokenizer()
    policy = TextPolicy(MaskPredictor(model, words.mask_token_id, words.pad_token_id), words, options.length)
    modules = {"model": model}
    weights = Weights(modules, lora_config(options.rank, options.rank / 2, "auto", modules))
    rows = [Prompt("a" * options.prompt) for _ in range(options.groups)]
    model.config.save_pretrained(folder / "model")  # the plan reads its attention from this config
    chosen = settings(options, folder)
    chosen.run.folder.mkdir(exist_ok=True)
    rewards = [Reward("alternating", alternating)]
    return text_loop(chosen, policy, weights, rewards=rewards, train_prompts=rows, accelerator=accelerator)


def measured(options: argparse.Namespace) -> list[dict[str, float]]:
    """Return for each iteration the peak in bytes, and tokens per second of the rollout and of the update."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = loop_of(options, Path(folder))
        trainer.run()
        cost = predict_cost(trainer.state.config)
    lines = [line for line in trainer.state.report.lines if line["phase"] == "train"]
    assert all(line["cost/model_evaluations"] == cost.rollout + cost.update for line in lines)
    canvas = options.prompt + options.length
    return [
        {
            "peak": line["memory/peak_bytes"],
            "rollout": line["cost/decoded"] * options.length / line["time/rollout"],
            "update": line["cost/update_evaluations"] * canvas / line["time/update"],
        }
        for line in lines
    ]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; its defaults are LLaDA-8B's sizes."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"vocabulary": 126_464, "hidden": 4096, "layers": 32, "heads": 32, "rank": 128}
    numbers |= {"prompt": 128, "length": 256, "steps": 128, "block_length": 32, "iterations": 1}
    numbers |= {"groups": 2, "group_size": 6, "passes": 1, "micro_batch": 4, "rollout_batch": 12}
    for name, default in numbers.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"{default}")
    made.add_argument("--preset", default="gdpo")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--cache", choices=("prefix", "dual"), help="of keys and values, for the decoder")
    made.add_argument("--gradient-checkpointing", action="store_true")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = parser().parse_args(arguments)
    print("| iteration | peak GiB | rollout, tokens a second | update, tokens a second |\n|---|---|---|---|")
    for number, found in enumerate(measured(options), start=1):
        print(f"| {number} | {found['peak'] / 2**30:.1f} | {found['rollout']:.0f} | {found['update']:.0f} |")


if __name__ == "__main__":
    main()
