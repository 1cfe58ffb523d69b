"""`flowgrpo sample`: the options of the command, and the config that they stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowgrpo import config
from flowgrpo.commands import options
from flowgrpo.commands.terminal import Format, print_json, print_line
from flowgrpo.data import configs, yaml_maps
from flowgrpo.errors import InputError
from flowgrpo.schema.readable import counted
from flowgrpo.schema.schedule import read_part
from flowgrpo.schema.sections import RunConfig

if TYPE_CHECKING:
    from flowgrpo.data.prompts import Row

BESIDE_CONFIG = ("model", "call", "groups", "pairs", "form")  # options that go with a config


def sample(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="built-in name, folder or hub id; with --groups also a config")
    ],
    out_folder: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="folder to write")] = None,
    *,
    call: Annotated[
        list[str] | None,
        typer.Argument(
            help="arguments of the pipeline's call; for a language model length, decoder and so on; for a config its keys",
            metavar="[KEY=VALUE ...]",
        ),
    ] = None,
    groups: Annotated[
        Path | None,
        typer.Option(
            "--groups", metavar="DIR", help="write groups of latents with rewards, to train from (data.groups)"
        ),
    ] = None,
    group_size: Annotated[
        int | None, typer.Option("--group-size", min=2, help="with --groups: samples of each prompt; by default 16")
    ] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option("--reward", metavar="REWARD", help="with --groups or --search: a name or a map; can be repeated"),
    ] = None,
    pairs: Annotated[
        Path | None,
        typer.Option(
            "--pairs",
            metavar="FILE",
            help="with --groups: read preference pairs, a .parquet file or a folder, in Pick-a-Pic's columns",
        ),
    ] = None,
    search: options.Search = None,
    width: options.Width = None,
    keep: options.Keep = None,
    level: options.Level = None,
    compare_at: options.CompareAt = None,
    temperature: options.Temperature = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help="a prompt; can be repeated")
    ] = None,
    prompts_file: options.PromptsFile = None,
    column: options.Column = "prompt",
    adapter: Annotated[
        str | None,
        typer.Option("--adapter", metavar="LORA", help="an export, or another LoRA that model.lora.path accepts"),
    ] = None,
    adapter_steps: Annotated[
        str | None,
        typer.Option(
            "--adapter-steps", metavar="FIRST:END", help="part of the steps in which --adapter acts, such as 0:0.6"
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="prompt i starts from seed + i; with --groups as run.seed")] = 0,
    batch_size: options.SampleBatch = 16,
    dtype: options.Dtype = "float32",
    quantise: options.Quantise = None,
    variant: options.Variant = None,
    text_encoders: options.TextEncoders = "offload",
    vae: options.Vae = "keep",
    vae_tiling: options.VaeTiling = False,
    attention: options.Attention = None,
    compile_blocks: options.Compile = False,
    form: Format = "human",
) -> None:
    """Sample pictures, or the answers of a language model, into a folder with a manifest; or groups to train from."""
    if (out_folder is None) == (groups is None):
        raise InputError("give either --out DIR, for samples to look at, or --groups DIR, for groups to train from")
    refuse_alone("--groups DIR", groups is not None, {"--group-size": group_size, "--pairs": pairs})
    refuse_alone("--groups DIR or --search", groups is not None or search is not None, {"--reward": reward})
    of_search: dict[str, Any] = {"--width": width, "--keep": keep, "--level": level}
    of_search |= {"--compare-at": compare_at, "--temperature": temperature}
    refuse_alone("--search", search is not None, of_search)
    if search is not None and groups is not None:
        raise InputError("--search: groups are not searched; give --out DIR in place of --groups")
    part = read_part(adapter_steps, "--adapter-steps")
    if part is not None and (adapter is None or groups is not None):
        raise InputError("--adapter-steps: it is for samples of an adapter, give --adapter DIR and --out DIR, too")
    if part is not None and search in ("beam", "smc"):
        raise InputError(f"--adapter-steps: {search} takes steps one by one, with the whole adapter; leave it out")
    if groups is not None and is_config(model):
        settings = _of_config(context, model, call or [])
        from flowgrpo.commands.exit_status import suggest_override

        with suggest_override(settings):
            _write_groups(settings, None, groups, pairs=pairs, form=form)
        return
    if pairs is None and (prompt is None) == (prompts_file is None):
        raise InputError("give either --prompt TEXT (once or more) or --prompts FILE")
    arguments = dict(config.override(text) for text in call or [])
    switches: dict[str, Any] = {"text_encoders": text_encoders, "vae": vae, "vae_tiling": vae_tiling}
    switches |= {"attention": attention, "compile": compile_blocks}
    spare = {
        f"--batch-size {batch_size // 2}": batch_size > 1,
        "--dtype bfloat16": dtype == "float32",
        "--vae-tiling": not vae_tiling,
        "--quantise int8": quantise is None,
    }
    from flowgrpo.commands.exit_status import suggest_option
    from flowgrpo.commands.samples.sample import as_options, choose_rows, sample_to_folder
    from flowgrpo.training.reports.samples import ModelUse, Switches

    if groups is not None:
        if pairs is None and reward is None:
            raise InputError("--reward: groups are scored as they are sampled, name a reward (once or more)")
        keys = {"path": model, "call": arguments, "dtype": dtype, "quantise": quantise, "variant": variant, **switches}
        written: dict[str, Any] = {
            "model": keys | ({"lora": {"path": _parse_map(adapter, "--adapter")}} if adapter is not None else {}),
            "algorithm": {"preset": "rwr"},  # its rollouts take Euler steps, as the pipeline does
            "train": {"group_size": group_size or 16, "micro_batch": batch_size},
            "run": {"seed": seed},
        }
        if pairs is None:
            written["rewards"] = [_parse_map(text, "REWARD") for text in reward or []]
        settings = config.validate(written)
        rows = None if pairs is not None else choose_rows(prompt, prompts_file, 0, column)
        with suggest_option(spare), as_options():
            _write_groups(settings, rows, groups, pairs=pairs, form=form)
        return
    assert out_folder is not None
    use = ModelUse(
        path=model,
        call=arguments,
        adapter=_parse_map(adapter, "--adapter"),
        dtype=dtype,
        quantise=quantise,
        variant=variant,
        adapter_steps=part,
        switches=Switches(**switches),
    )
    if search is not None:
        from flowgrpo.commands.samples.search import read_search, search_to_folder

        searched = read_search(
            search,
            width,
            None if reward is None else [_parse_map(text, "REWARD") for text in reward],
            keep=keep,
            level=level,
            compare_at=compare_at,
            temperature=temperature,
        )
        rows = choose_rows(prompt, prompts_file, seed, column)
        with suggest_option(spare), as_options():
            found = search_to_folder(use, rows, searched, out=out_folder, batch_size=batch_size)
        if form == "json":
            print_json({"folder": str(out_folder), **found})
        else:
            print_line(f"{counted(len(rows), 'sample')} in {out_folder}")
            print_line(f"{_cost_text(found['cost'])}; plain samples: {_cost_text(found['plain_cost'])}")
        return
    rows = choose_rows(prompt, prompts_file, seed, column)
    with suggest_option(spare), as_options():
        lines = sample_to_folder(use, rows, out_folder, batch_size)
    if form == "json":
        print_json({"folder": str(out_folder), "samples": lines})
    else:
        print_line(f"{counted(len(lines), 'sample')} in {out_folder}")


def refuse_alone(option: str, given: bool, others: Mapping[str, Any]) -> None:
    """Raise InputError if any of `others`, options by name, is given without `option`."""
    if not given and (named := [name for name, value in others.items() if value is not None]):
        raise InputError(f"{named[0]}: it is for {option}, say that too")


def _cost_text(cost: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in cost.items())


def _parse_map(text: str | None, place: str) -> Any:
    """Return the map in a text in braces, or the text itself; errors name `place`."""
    return yaml_maps.parse_yaml(text, place) if text is not None and text.startswith("{") else text


def is_config(target: str) -> bool:
    """Return whether a target is a config, not a model."""
    return not Path(target).is_dir() and configs.place_of(target).suffix in (".yaml", ".yml")


def _of_config(context: typer.Context, path: str, overrides: list[str]) -> RunConfig:
    """Load a config that is given in place of a model; refuse options for which it has keys."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in BESIDE_CONFIG and source is not None and source.name == "COMMANDLINE":
            option = {"prompts_file": "prompts", "compile_blocks": "compile"}.get(name, name).replace("_", "-")
            raise InputError(f"--{option}: {path} is a config, which has a key for that; write KEY=VALUE")
    return config.load(path, overrides)


def _write_groups(
    settings: RunConfig, rows: Sequence[Row] | None, folder: Path, *, pairs: Path | None, form: str
) -> None:
    from flowgrpo.commands.samples.groups import write

    manifest = write(settings, rows, folder, pairs)
    if form == "json":
        print_json({"folder": str(folder), "manifest": manifest})
    else:
        words = "pairs" if pairs is not None else f"groups of {manifest['group_size']}"
        print_line(f"{manifest['groups']} {words} in {folder}")
