"""Command-line options that several commands share, or that would make the signature of one too long."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

OutFile = Annotated[Path | None, typer.Option("--out", metavar="FILE")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one")]
Step = Annotated[int | None, typer.Option("--step", help="a checkpoint's step; by default the last")]
PromptsFile = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help=".txt, .jsonl, .json, .csv, .tsv, .parquet, a built-in set, a corpus (gsm8k:test) or hub:owner/name:split",
    ),
]
Column = Annotated[
    str, typer.Option("--column", metavar="NAME", help="of a table or a hub dataset, the column that holds the prompt")
]
Device = Annotated[str | None, typer.Option("--device", help="by default the first GPU, if there is one")]
SampleBatch = Annotated[int, typer.Option("--batch-size", min=1, help="samples in one call of the model")]
ScoreBatch = Annotated[
    int | None,
    typer.Option("--batch-size", min=1, help="samples that a reward, and its model, gets at once; by default 16"),
]
Search = Annotated[
    Literal["best-of-n", "beam", "smc"] | None,
    typer.Option("--search", help="of several candidates of a prompt keep one, by --reward"),
]
Width = Annotated[
    int | None, typer.Option("--width", metavar="N", min=1, help="of --search: candidates of a prompt; by default 8")
]
Keep = Annotated[
    int | None,
    typer.Option("--keep", metavar="N", min=1, help="of beam: candidates that stay; by default half of --width"),
]
Level = Annotated[
    float | None,
    typer.Option("--level", help="of beam and smc: noise level of the kernel flow_sde; by default 0.7"),
]
CompareAt = Annotated[
    str | None,
    typer.Option(
        "--compare-at",
        metavar="F,F,...",
        help="of beam and smc: fractions of the steps where candidates are compared; by default 0.25,0.5,0.75",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", help="of smc: samples weigh exp(reward / temperature)"),
]
Dtype = Annotated[Literal["float32", "bfloat16", "float16"], typer.Option("--dtype")]
Variant = Annotated[
    str | None,
    typer.Option(
        "--variant", metavar="WORD", help="in the names of the files of weights, such as fp16; as model.variant"
    ),
]
RewardDtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option("--dtype", help="for the rewards that hold a model; by default their own"),
]
Quantise = Annotated[
    Literal["int8", "nf4"] | None, typer.Option("--quantise", help="keep the base so, as model.quantise does")
]
TextEncoders = Annotated[
    Literal["keep", "offload", "free"],
    typer.Option("--text-encoders", help="once all prompts are encoded; as model.text_encoders"),
]
Vae = Annotated[Literal["keep", "offload"], typer.Option("--vae", help="as model.vae")]
VaeTiling = Annotated[bool, typer.Option("--vae-tiling", help="decode in tiles; as model.vae_tiling")]
Attention = Annotated[
    str | None,
    typer.Option(
        "--attention", metavar="BACKEND", help="of diffusers, as model.attention: native, flash, xformers, ..."
    ),
]
Compile = Annotated[bool, typer.Option("--compile", help="compile the model's repeated blocks; as model.compile")]
Gpus = Annotated[
    int | None,
    typer.Option("--gpus", metavar="N", min=1, help="seconds and memory of an iteration on N GPUs, beside 1 to 512"),
]
GpuType = Annotated[
    str | None, typer.Option("--gpu-type", metavar="NAME", help="of --gpus: a100, h100 (by default), h200, b200, ...")
]
GpusPerNode = Annotated[
    int | None, typer.Option("--gpus-per-node", metavar="N", min=1, help="of --gpus: GPUs of a machine; by default 8")
]
FixedSeconds = Annotated[
    float | None,
    typer.Option("--fixed-seconds", min=0, help="of --gpus: of an iteration, what no GPU takes away; by default 20"),
]
