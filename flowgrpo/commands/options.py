"""Command-line options that several commands share, or that would make the signature of one too long."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import typer

OutFile = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="page to write; by default in the first folder")
]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="port to listen on; 0 picks a free one")]
Step = Annotated[int | None, typer.Option("--step", help="step of the checkpoint; by default the last")]
PromptsFile = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help=".txt, .jsonl, .json, .csv, .tsv or .parquet, a built-in set, a corpus (gsm8k:test) or hub:owner/name:split",
    ),
]
Column = Annotated[
    str, typer.Option("--column", metavar="NAME", help="column with the prompt, in a table or a hub dataset")
]
Device = Annotated[
    str | None, typer.Option("--device", help="device of the rewards; by default the first GPU, else the CPU")
]
SampleBatch = Annotated[int, typer.Option("--batch-size", min=1, help="samples in one model call")]
ScoreBatch = Annotated[
    int | None,
    typer.Option("--batch-size", min=1, help="samples in one call of a reward and its model; by default 16"),
]
Search = Annotated[
    Literal["best-of-n", "beam", "smc"] | None,
    typer.Option("--search", help="make several candidates for each prompt, keep the best by --reward"),
]
Width = Annotated[
    int | None,
    typer.Option("--width", metavar="N", min=1, help="with --search: candidates for each prompt; by default 8"),
]
Keep = Annotated[
    int | None,
    typer.Option("--keep", metavar="N", min=1, help="with --search beam: candidates kept; by default half of --width"),
]
Level = Annotated[
    float | None,
    typer.Option("--level", help="with --search beam or smc: noise level of the kernel flow_sde; by default 0.7"),
]
CompareAt = Annotated[
    str | None,
    typer.Option(
        "--compare-at",
        metavar="F,F,...",
        help="with --search beam or smc: where to compare candidates, as fractions of the steps; by default 0.25,0.5,0.75",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", help="with --search smc: a candidate has the weight exp(reward / temperature)"),
]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"],
    typer.Option("--dtype", help="type of the weights and of the computation"),
]
Variant = Annotated[
    str | None,
    typer.Option(
        "--variant",
        metavar="WORD",
        help="read weight files with this word in their names, such as fp16; as model.variant",
    ),
]
RewardDtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option("--dtype", help="type of reward models; by default each model's own"),
]
Quantise = Annotated[
    Literal["int8", "nf4"] | None,
    typer.Option("--quantise", help="hold the weights of the base in int8 or nf4; as model.quantise"),
]
TextEncoders = Annotated[
    Literal["keep", "offload", "free"],
    typer.Option(
        "--text-encoders", help="what to do with text encoders after all prompts are encoded; as model.text_encoders"
    ),
]
Vae = Annotated[
    Literal["keep", "offload"],
    typer.Option("--vae", help="keep the VAE on the device, or offload it to host memory between uses; as model.vae"),
]
VaeTiling = Annotated[bool, typer.Option("--vae-tiling", help="decode in tiles, with less memory; as model.vae_tiling")]
Attention = Annotated[
    str | None,
    typer.Option(
        "--attention",
        metavar="BACKEND",
        help="attention backend of diffusers: native, flash, xformers, ...; as model.attention",
    ),
]
Compile = Annotated[bool, typer.Option("--compile", help="compile the model's repeated blocks; as model.compile")]


def _read_gib(text: str) -> float:
    """Return a size in GiB; raise `typer.BadParameter` if it is not a number from 1."""
    try:
        size = float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no number; give GiB, such as 23.6") from None
    if not 1 <= size < math.inf:
        raise typer.BadParameter(f"{text} is no size of a GPU; give GiB, such as 23.6")
    return size


GpuMemory = Annotated[
    float | None,
    typer.Option(
        "--gpu-memory",
        metavar="GIB",
        parser=_read_gib,
        help="check whether the run fits a GPU of this size, and show what to set",
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option(
        "--gpus",
        metavar="N",
        min=1,
        help="predict seconds and memory of an iteration on N GPUs; 1 to 512 are shown for comparison",
    ),
]
GpuType = Annotated[
    str | None, typer.Option("--gpu-type", metavar="NAME", help="with --gpus: a100, h100 (default), h200, b200, ...")
]
GpusPerNode = Annotated[
    int | None,
    typer.Option("--gpus-per-node", metavar="N", min=1, help="with --gpus: GPUs in each machine; by default 8"),
]
FixedSeconds = Annotated[
    float | None,
    typer.Option(
        "--fixed-seconds",
        min=0,
        help="with --gpus: seconds of an iteration that more GPUs do not reduce; by default 20",
    ),
]
