"""Fine-tune image, video, sound and masked-diffusion language models with online reinforcement learning.

Exit status: 0 done; 2 wrong input (one sentence on stderr); 130 interrupted; 1 any other failure, such as a run that had
nothing to learn.
"""

from __future__ import annotations

import errno
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from flowgrpo import config
from flowgrpo.commands import init, mdlm, models, options
from flowgrpo.commands.evaluations import evaluating
from flowgrpo.commands.inspect import reporting
from flowgrpo.commands.methods import methods as method_catalogue
from flowgrpo.commands.samples import sampling
from flowgrpo.commands.scores import rewards as catalogue
from flowgrpo.commands.scores import serve as serving
from flowgrpo.commands.terminal import Commands, Format, out, print_json, print_line, say, table_lines
from flowgrpo.data import configs, run_folders
from flowgrpo.errors import InputError, UploadFailed
from flowgrpo.schema.validation import find_key
from flowgrpo.training.run.out_of_memory_error import OutOfMemory
from rewards import RewardError
from rewards.memory import is_out_of_memory

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    help=__doc__.splitlines()[0],
    context_settings={"help_option_names": ["-h", "--help"]},
)
UNUSABLE = (
    errno.ENAMETOOLONG,
    errno.EACCES,
    errno.EPERM,
    errno.ELOOP,
    errno.EROFS,
)  # errors of a path that a user gave
UsageError: Any = typer.BadParameter.__base__  # click's, which typer ships under a private name

Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="config keys to set, such as train.groups=4; values are YAML", metavar="[KEY=VALUE ...]"),
]
app.add_typer(mdlm.app, name="mdlm")


def _show_version(asked: bool) -> None:
    if asked:
        from flowgrpo.schema.imports.packages import installed

        out.print(f"flowgrpo {installed('flowgrpo')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Declare the options of `flowgrpo` itself, which stand before the command."""


app.command()(init.init)


@app.command()
def train(
    path: Annotated[Path, typer.Argument(metavar="CONFIG", help="a YAML file, or a name that `flowgrpo init` lists")],
    overrides: Overrides = None,
) -> None:
    """Train one run into runs/NAME/; run.resume=true continues it, run.resume=auto begins or continues it."""
    settings = config.load(path, overrides or [])
    from flowgrpo.commands import exit_status, launch
    from flowgrpo.commands.runs import folder_check
    from flowgrpo.training.run import run_folder as folders

    launch.end_with_launcher()
    if launch.needs_relaunch(settings.run.processes):
        with folders.lock_folder(settings.run.folder):
            # Refused here if the folder is in use, since in new processes only rank 0 would fail while the others wait.
            folder_check.check(folder_check.decide_resume(settings))
        with exit_status.report_stops(path, overrides or []):
            raise typer.Exit(launch.relaunch(settings.run.processes, settings.run.folder))
    from flowgrpo.commands.runs.train import train_config

    with exit_status.report_stops(path, overrides or []):
        run = train_config(settings, configs.place_of(path))
    from flowgrpo.commands.page_parts import history

    if launch.is_main():
        if (sentence := history.held_out_words(run.metrics)) is not None:
            print_line(sentence)
        print_line(f"run      {run.folder}")
        print_line(f"gallery  {run.folder / 'gallery.html'}")


@app.command()
def plan(
    path: Annotated[Path, typer.Argument(metavar="CONFIG|RUN", help="a config, or the folder of a run")],
    overrides: Overrides = None,
    *,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="KEY", help="show what a config key means, and its default")
    ] = None,
    gpu_memory: options.GpuMemory = None,
    gpus: options.Gpus = None,
    gpu_type: options.GpuType = None,
    gpus_per_node: options.GpusPerNode = None,
    fixed_seconds: options.FixedSeconds = None,
    full: Annotated[bool, typer.Option("--full", help="also show the resolved config")] = False,
    form: Format = "human",
) -> None:
    """Show the tree, the batch, the model evaluations and the memory of a run, without any training."""
    is_run = path.is_dir() and (path / "config.yaml").is_file()
    in_folder = path.parent.name and path.parent.is_dir() and not path.suffix
    if in_folder and not path.exists() and (near := run_folders.similar(path)):
        raise InputError(f"{path}: there is no such config or run, did you mean {near[0]!r}?")
    settings = None if is_run else config.load(path, overrides or [])  # refused before anything heavy is imported
    from flowgrpo.commands.runs import plan as command

    settings = settings or command.load_run_config(path, overrides or [])
    asked = {"--gpu-type": gpu_type, "--gpus-per-node": gpus_per_node, "--fixed-seconds": fixed_seconds}
    if explain is None:
        command.show(settings, gpu_memory, command.choose_machines(gpus, asked), form, full=full)
    else:
        command.show_meaning(settings, explain, form)


app.command()(sampling.sample)


@app.command()
def gallery(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN|DIR ...", help="folders of runs or of samples")],
    out_file: options.OutFile = None,
    trees: Annotated[bool, typer.Option("--trees", help="show the trees that one run kept (run.trees)")] = False,
) -> None:
    """Write one self-contained page: a run before and after at the same seeds, several runs compared, or a run's trees."""
    for place, folder in enumerate(folders):
        if not folder.is_dir():
            raise InputError(f"{folder}: there is no such folder{run_folders.hint(folder)}")
        if folder.resolve() in [other.resolve() for other in folders[:place]]:
            raise InputError(f"{folder}: this folder is named twice; name each run once")
    if trees:
        if len(folders) > 1:
            raise InputError(f"--trees: the page is of one run, and {len(folders)} are named; name one")
        from flowgrpo.commands.page_parts.trees import TREES, write_trees

        page = write_trees(folders[0], out_file or folders[0] / TREES)
    else:
        from flowgrpo.commands.inspect.gallery import write_gallery

        name = "compare.html" if len(folders) > 1 else "gallery.html"
        page = write_gallery(folders, out_file or folders[0] / name)
    print_line(str(page))


app.command()(reporting.explain)
app.command()(reporting.report)
app.command()(reporting.watch)
app.command()(reporting.vote)


@app.command()
def score(
    uses: Annotated[
        list[str],
        typer.Argument(metavar="REWARD ...", help="a name, ./file.py:object, a URL, or a map such as '{use: ...}'"),
    ],
    samples: Annotated[
        Path,
        typer.Option(
            "--samples", metavar="DIR", help="folder of samples; its manifest.jsonl or file names give the prompts"
        ),
    ],
    *,
    batch_size: options.ScoreBatch = None,
    dtype: options.RewardDtype = None,
    device: options.Device = None,
    form: Format = "human",
) -> None:
    """Score existing pictures, videos, sounds or texts."""
    from flowgrpo.commands.exit_status import suggest_option
    from flowgrpo.commands.scores.score import BATCH, load_rewards, score_folder, table

    used = load_rewards(uses, dtype=dtype, batch_size=batch_size, device=device)
    rows = batch_size or BATCH
    with suggest_option({f"--batch-size {rows // 2}": rows > 1}):
        scored = score_folder(samples, used, rows)
    if form == "json":
        print_json(scored)
    else:
        out.print(table(scored))


app.command()(evaluating.evaluate)
app.command()(catalogue.rewards)
app.command()(method_catalogue.methods)
app.command()(serving.serve)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run")],
    out_folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="folder to write")],
    *,
    step: options.Step = None,
    comfyui: Annotated[bool, typer.Option("--comfyui", help="also write the LoRA with ComfyUI's key names")] = False,
    push_to_hub: Annotated[
        str | None,
        typer.Option("--push-to-hub", metavar="OWNER/NAME", help="upload the export to this repository of the hub"),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="make that repository private")] = False,
    form: Format = "human",
) -> None:
    """Write a run's LoRA (diffusers' format, peft's for texts) or its full weights, with a model card and samples."""
    from flowgrpo.commands.runs.export import export as export_run

    done = export_run(run, out_folder, step, comfyui=comfyui, push_to_hub=push_to_hub, private=private)
    if form == "json":
        print_json({**asdict(done), "folder": str(done.folder)})
    else:
        print_line(f"step {done.step} ({done.kind}) in {done.folder}" + f", {done.url}" * bool(done.url))


@app.command()
def doctor(
    target: Annotated[
        str, typer.Argument(metavar="MODEL|CONFIG", help="a model (built-in name, folder or hub id) or a config")
    ],
    overrides: Overrides = None,
    spectrum: Annotated[
        int | None,
        typer.Option(
            min=600, metavar="N", help="model evaluations for the check `spectrum`; by default about a minute of them"
        ),
    ] = None,
    form: Format = "human",
) -> None:
    """Check a model or a config before spending GPU hours on it; exit status 1 if a check fails."""
    from flowgrpo.commands.exit_status import suggest_override
    from flowgrpo.commands.model_kinds import KINDS, detect_kind
    from flowgrpo.training.reports.progress import open_display
    from flowgrpo.training.run.phases import phase

    if sampling.is_config(target):
        settings = config.load(target, overrides or [])
    else:
        kind = KINDS[detect_kind(target, config.similar(Path(target)))]
        settings = config.apply_override(kind.doctor.defaults(target), overrides or [])
    if spectrum is not None and settings.kind != "flow":
        raise InputError(f"--spectrum: {settings.kind} has no noisy steps to measure, leave it out")
    budget = {} if spectrum is None else {"evaluations": spectrum}
    checks = []
    with open_display(), suggest_override(settings), phase("checking"):
        for check in KINDS[settings.kind].doctor.examine(settings, **budget):
            checks.append(check)
            if form == "human":
                word, style = (
                    ("FAIL", "red") if not check.ok else ("warn", "yellow") if check.advice else ("ok  ", "green")
                )
                out.print(word, style=style, end="")
                out.print(f" {check.name:13} ", end="")
                print_line(check.value)
                if check.advice:
                    print_line(f"     {check.advice}")
                for line in table_lines(check.table):
                    out.print(f"     {line}")
    ok = all(check.ok for check in checks)
    if form == "json":
        print_json({"ok": ok, "checks": [asdict(check) for check in checks]})
    if not ok:
        raise typer.Exit(1)


app.command()(models.models)


def _as_override(error: Any) -> str:
    """Return the end of the message of an unknown option that is a key of a config; else ""."""
    key = getattr(error, "option_name", "").lstrip("-").partition("=")[0].replace("-", "_")
    found = find_key(config.CONFIGS["flow"](), key) if type(error).__name__ == "NoSuchOption" else None
    return "" if found is None else f". Keys of a config are written without dashes, {found}=VALUE"


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line and return the exit status."""
    try:
        status = app(args=arguments, prog_name="flowgrpo", standalone_mode=False)
    except (InputError, RewardError, UploadFailed) as error:
        say(f"flowgrpo: {error}")
        return 1 if isinstance(error, UploadFailed) else 2
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            return 0
        say(f"flowgrpo: {error.format_message()}{_as_override(error)}")
        return 2
    except OSError as error:
        if error.filename is None or error.errno not in UNUSABLE:
            raise
        say(f"flowgrpo: {error.filename} cannot be used ({error.strerror})")
        return 2
    except (KeyboardInterrupt, typer.Abort):
        say("flowgrpo: interrupted")
        return 130
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        say(f"flowgrpo: {error if isinstance(error, OutOfMemory) else OutOfMemory(None, error)}")
        return 1
    return status if isinstance(status, int) else 0
