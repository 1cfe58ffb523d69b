"""Commands for language models only: `flowgrpo mdlm tracelock`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from flowgrpo.commands.options import Variant
from flowgrpo.commands.terminal import Format, out, print_json, print_line
from flowgrpo.data import yaml_maps

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Train a controller that speeds up a language model's decoding (tracelock).",
)


@app.callback()
def _group() -> None:
    """Keep `tracelock` a subcommand: without a callback, typer would run the only command directly."""


@app.command()
def tracelock(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="masked-diffusion language model: a folder or a hub id")
    ],
    source: Annotated[
        str,
        typer.Option("--prompts", metavar="FILE", help=".txt, .jsonl, a built-in set, or a corpus such as gsm8k:test"),
    ],
    out_folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="folder to write")],
    *,
    length: Annotated[int, typer.Option("--length", min=1, help="tokens in an answer")] = 64,
    decoder: Annotated[
        str,
        typer.Option(
            "--decoder", metavar="SPEC", help="decoder that the controller learns from, written as in a config (YAML)"
        ),
    ] = "low_confidence",
    prompt_count: Annotated[
        int, typer.Option("--prompt-count", min=2, help="largest number of prompts; one in eight is held out")
    ] = 256,
    steps: Annotated[int, typer.Option("--steps", min=1, help="training steps")] = 2000,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option("--dtype", help="type of the weights and of the computation"),
    ] = "float32",
    variant: Variant = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="run code that comes with the model")
    ] = False,
    chat: Annotated[bool, typer.Option("--chat", help="put prompts into the tokenizer's chat template")] = False,
    form: Format = "human",
) -> None:
    """Train a controller that commits tokens early, for the decoder trace_lock of a model (docs/guides/texts.md)."""
    from flowgrpo.mdlm.controller.train_controller import Judged, teach
    from rewards.compute import DTYPES

    def show_progress(judged: Judged) -> None:
        out.print(f"step {judged.step} of {steps}: loss {judged.loss:.3f}, F-half {judged.f_half:.3f}")

    result = teach(
        model,
        source,
        out_folder,
        length=length,
        decoder=yaml_maps.parse_yaml(decoder, "--decoder"),
        prompt_count=prompt_count,
        steps=steps,
        seed=seed,
        dtype=DTYPES[dtype],
        variant=variant,
        trust_remote_code=trust_remote_code,
        chat=chat,
        watch=show_progress if form == "human" else None,
    )
    if form == "json":
        print_json(asdict(result))
        return
    out.print(f"learned from {result.learned} prompts; on {result.held_out} others:")
    table = Table("decoder", "evaluations", "same tokens", "same answers", box=None, padding=(0, 2))
    for row in result.compared:
        table.add_row(row.decoder, f"{row.evaluations:.1f}", f"{row.same_tokens:.3f}", f"{row.same_answers:.3f}")
    out.print(table)
    kept = result.kept
    print_line(f"kept that of step {kept.step}, F-half {kept.f_half:.3f} at {result.threshold:g}, in {result.folder}")
    print_line(f"in a config: decoder: {{name: trace_lock, scorer: {{controller: {result.folder}}}}}")
