"""Every command that a page shows is run at a small size, or where it cannot be, is parsed and its config is read.

The commands of a page are run from its top to its bottom in one folder, as a reader would who types them. `MADE` has what
lies there before, `WORDS` what is replaced in them, `CHECKED` which are not run; a command is run unless `CHECKED` has it.
"""

import argparse
import io
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import typer
from cases import cases
from page_commands import commands, inline
from page_folders import MADE, furnished

from flowgrpo import cli, config
from flowgrpo.cli import UsageError
from flowgrpo.errors import InputError
from flowgrpo.flow.diagnostics import spectrum

pytestmark = pytest.mark.usefixtures("kept_trials")
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
SHOWN = {str(page.relative_to(ROOT)): commands(str(page.relative_to(ROOT)), page.read_text()) for page in PAGES}
WITH_COMMANDS = [page for page, shown in SHOWN.items() if shown]

WEIGHTS = "needs weights or data of the hub"
DEVICES = "needs several GPUs or hosts"
ENGINE = "needs a server that is not there"
SERVES = "serves until it is stopped"
MINUTES = "computes for minutes; a test of its own has it smaller"
LARGE = "measures the memory of billions of weights for long; test_memory_budget.py has smaller ones"
INSTALLS = "installs packages, or runs this suite"
# Commands that are not run, by a pattern, with why. The first pattern that is found in a command counts.
CHECKED = {
    r"^(make|pip|docker) |-m pytest ": INSTALLS,
    r"^hf ": WEIGHTS,
    r"^sglang |text_engine": ENGINE,
    r"^REWARD_TOKEN=": SERVES,
    r"^python (scripts|research)/": MINUTES,
    r"^flowgrpo mdlm tracelock": MINUTES,
    r"^(accelerate launch|torchrun|srun) ": DEVICES,
    r"run\.(processes=[2-9]|sharding=)": DEVICES,
    r"run\.engine": ENGINE,
    r"http://127": ENGINE,
    r"^flowgrpo (serve|watch|vote) ": SERVES,
    r"--spectrum 60000": MINUTES,
    r"--push-to-hub": WEIGHTS,
    r"gsm8k": WEIGHTS,
    r"^flowgrpo plan (flux|wan|llada|mine.yaml|edit.yaml)": LARGE,
    r"^flowgrpo train (flux|sd35$|sd35 |sd35-medium train.micro_batch=auto|wan|llada)": WEIGHTS,
}
OWN = "stands for something of the reader's"
OPTIONAL = "says what may be left out"
AGAIN = "the page shows several ways to write one folder, which must be new"
LONG = "would take long"
# Words of pages that are replaced: what is put there, None for nothing, and why.
WORDS = {
    "docs/guides/reward_hacking.md": {"MODEL": ("{tiny}", OWN), "STEP": ("1", OWN)},
    "docs/guides/adapters.md": {"CONFIG": ("tiny.yaml", OWN)},
    "docs/guides/prompts.md": {"CONFIG": ("tiny.yaml", OWN)},
    "docs/guides/votes.md": {
        "MODEL": ("{tiny}", OWN),
        "rewards=[{use: votes, options: {file: pictures/votes.jsonl, of: clip_score}}]": (
            "rewards=[{use: votes, options: {file: votes.jsonl, of: jpeg_size}}]",
            WEIGHTS,
        ),
    },
    "docs/reference/models.md": {"FOLDER": ("{tiny}", OWN)},
    "docs/guides/evaluation.md": {
        "evaluations/shapes-eval/redder-step-000006": ("evaluations/shapes-eval/redder-step-000002", LONG)
    },
    "docs/guides/export.md": {"redder-lora": ("redder-lora-{line}", AGAIN)},
    "docs/guides/texts.md": {"MODEL": ("digits", OWN), "length=256": ("length=12", LONG)},
    "docs/research/methods/drafts.md": {
        "train.draft={pool: 4, call: CALL}": ("train.draft={pool: 2, call: {num_inference_steps: 2}}", OWN),
        "train.draft={pool: 4, call: {num_inference_steps: 6}, precision: PRECISION}": ("train.draft={pool: 2}", OWN),
    },
    "docs/guides/offline.md": {
        "[KEY=VALUE": (None, OPTIONAL),
        "...]": (None, OPTIONAL),
        "[--group-size": ("--group-size", OPTIONAL),
        "N]": ("2", OPTIONAL),
        "MODEL": ("shapes", OWN),
        "CONFIG": ("tiny.yaml", OWN),
        "DIR": ("groups-{line}", OWN),
        "data.groups=DIR": ("data.groups=earlier", OWN),
        "FILE": ("prompts.txt", OWN),
        "8": ("4", LONG),
        "PAIRS": ("pairs.parquet", OWN),
        "REWARD": ("jpeg_size", OWN),
    },
    "docs/guides/search.md": {"shapes:eval": ("prompts.txt", LONG)},
}
# What makes a run small; a group has as many samples as its tree needs, and stored groups keep theirs.
SMALL = {
    "flow": ["train.iterations=1", "eval.prompts=1", "eval.save=1", "run.processes=1"],
    "mdlm": [
        "train.iterations=1",
        "train.groups=4",
        "train.group_size=4",
        "eval.prompts=2",
        "eval.save=2",
        "run.processes=1",
    ],
}
FEW_STEPS = "num_inference_steps=4"


def why_checked(command):
    """Why a command is not run, or None."""
    for pattern, reason in CHECKED.items():
        if re.search(pattern, command.text):
            return reason
    return reason_of_page(command)


def reason_of_page(command):
    """The configs that a page on real models has written by then are of those."""
    written = {"docs/start/model.md": "mine.yaml", "docs/guides/editing.md": "edit.yaml"}.get(command.page)
    is_real = written in command.words and command.words[1] != "init"
    return WEIGHTS if is_real else None


def with_words(command, tiny="TINY"):
    """A command with the words of its page put in."""
    put = WORDS.get(command.page, {})
    words = [put[word][0] if word in put else word for word in command.words]
    line = str(command.line)
    return [word.replace("{tiny}", str(tiny)).replace("{line}", line) for word in words if word is not None]


def on_the_tiny_model(words, tiny):
    """What takes a run of the embedded model to a tiny one, and to a reward that is not 0 of each of its pictures."""
    call = "{num_inference_steps: 4, guidance_scale: 1.0, height: 16, width: 16, max_sequence_length: 1}"
    rewarded = any(word.startswith("rewards") for word in words)
    return [f"model.path={tiny}", f"model.call={call}", *([] if rewarded else ["rewards=[jpeg_size]"])]


def made_small(words, command, tiny):
    """The words of a run or its doctor, with overrides behind them that make it small and give it a folder of its own."""
    settings = config.load(words[2], words[3:])
    added = list(SMALL[settings.kind])
    if settings.kind == "flow":
        added.append(f"train.groups={settings.train.updates}")  # one for each part of the update
    if settings.run.resume:
        return [*words, *added, "train.iterations=2"]
    if settings.kind == "flow" and settings.train.group_size > 4 and settings.stored_groups is None:
        tree = settings.algorithm.tree
        if any("branches" in word or "profile" in word for word in words):
            added.append("train.group_size=6")
        elif tree.name == "brush":
            added += ["train.group_size=3", "algorithm.tree.branches=3"]
            added += [f"algorithm.tree.profile={[3] * len(tree.profile)}"] if tree.profile else []
        else:
            added.append("train.group_size=4")
    again = settings.run.folder.exists()
    if again:
        added.append(f"run.name=line-{command.line}")
    if words[2].endswith("shapes.yaml") and (again or command.page.startswith("docs/research/methods/")):
        added += on_the_tiny_model(words, tiny)
    if settings.model.path == "shapes":
        added.append(f"model.call.{FEW_STEPS}")
        if (getattr(settings.algorithm.likelihood, "draws", None) or 1) > 2:
            added.append("algorithm.likelihood.draws=2")
            if settings.stored_groups is None:
                added.append("model.call.num_inference_steps=5")  # of which AWM draws from two
    if words[2].endswith("shapes.yaml") and not any("trees" in word for word in words):
        added.append("run.trees=null")  # its pictures of states are looked at where a page is about them
    return [*words, *added]


def refused(words):
    """What is wrong with the words of a command, as far as can be told without running it; None if nothing is."""
    try:
        match words:
            case ["pip" | "docker" | "hf" | "sglang" | ".venv/bin/python" | "printf", *_] | [
                "python",
                "text_engine.py",
                *_,
            ]:
                return None
            case ["make", target]:
                found = re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
                return None if found else f"the Makefile has no {target}"
            case ["python", script, *rest]:
                return wrong_script(ROOT / script, rest)
            case ["flowgrpo", *rest] | [_, "flowgrpo", *rest]:
                return wrong_words(rest)
            case ["srun", *rest]:
                return refused(rest)
            case ["accelerate", "launch", *rest] | ["torchrun", *rest]:
                return wrong_launch(words[0], rest)
    except (ValueError, OSError, UsageError) as error:
        return str(error)
    raise AssertionError(f"nothing here knows {words[0]}")


def wrong_words(words):
    """Parse words of `flowgrpo`, and read the config that they name with its overrides."""
    with typer.main.get_command(cli.app).make_context("flowgrpo", list(words)) as context:
        _, command, rest = context.command.resolve_command(context, list(words))
        with command.make_context(words[0], list(rest), parent=context) as inner:
            if words[0] in ("train", "plan"):
                config.load(inner.params["path"], inner.params["overrides"] or [])


WITHOUT_PARSER = ("effects", "mixture", "texts")  # tables that take no arguments


def wrong_script(script, words):
    """Parse words by the script's own parser, and read the configs of the methods that they name."""
    if script.stem == "oracle_tables" and words[0] in WITHOUT_PARSER:
        return None if words[1:] == [] and words[0] in runpy.run_path(str(script))["TABLES"] else f"no {words}"
    parse = argparse.ArgumentParser.parse_args
    parsed = []

    def once(self, *arguments, **options):
        parsed.append(parse(self, *arguments, **options))
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, redirect_stderr(io.StringIO()) as said:
        patch.setattr(argparse.ArgumentParser, "parse_args", once)
        patch.setattr(sys, "argv", [str(script), *(word for word in words if word != "...")])
        patch.syspath_prepend(str(script.parent))
        try:
            runpy.run_path(str(script), run_name="__main__")
        except KeyboardInterrupt:
            pass
        except SystemExit:
            return said.getvalue()
    for method in getattr(parsed[0], "methods", None) or []:
        name, _, rest = method.partition("=")
        preset, *overrides = shlex.split(rest.replace("KEY=VALUE ...", "")) or [name]
        overrides = [*getattr(parsed[0], "settings", ()), *overrides]
        of_kinds = runpy.run_path(str(script), run_name="read").get("SETTINGS", {})
        tasks = getattr(parsed[0], "tasks", ())
        for path in [ROOT / f"configs/{task}.yaml" for task in tasks] or [parsed[0].config]:
            shared = of_kinds.get(config.load(path).kind, ())
            config.load(path, [*shared, f"algorithm={{preset: {preset}}}", *overrides])
    return None


def wrong_launch(launcher, words):
    """Parse what stands before `-m flowgrpo` by the launcher's parser, and the rest as a command."""
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    parser = launch_command_parser() if launcher == "accelerate" else get_args_parser()
    at = words.index("-m")
    with redirect_stderr(io.StringIO()) as said:
        try:
            parser.parse_args([word.replace("configs/", f"{ROOT}/configs/") for word in words])
        except SystemExit:
            return said.getvalue()
    return refused(words[at + 1 :])


@pytest.fixture(scope="session")
def made(finished, tmp_path_factory):
    """What pages find in their folder, made once."""
    return furnished(tmp_path_factory.mktemp("made"), finished)


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    """An empty folder to work in, and a way to put into it what a page finds there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(spectrum, "EVALUATIONS", 60)  # of a doctor: as few starts as it takes to compare some

    def put(page):
        for name, source in {**MADE[""], **MADE.get(page, {})}.items():
            target = tmp_path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            origin = made / source
            (shutil.copytree if origin.is_dir() else shutil.copy)(origin, target)
        return tmp_path

    return put


def failed(command, tiny):
    """Run a command, or check it; what went wrong, or None."""
    words = with_words(command, tiny)
    if why_checked(command):
        return refused(words)
    if words[0] == "printf":
        subprocess.run(["sh", "-c", " ".join(word if word == ">" else shlex.quote(word) for word in words)], check=True)
        return None
    if words[1:2] == ["train"] or (words[1:2] == ["doctor"] and words[2].endswith(".yaml")):
        try:
            words = made_small(words, command, tiny)
        except InputError as error:
            return str(error)
    if words[1:3] == ["sample", "shapes"]:
        words.append(FEW_STEPS)
    if words[1:2] == ["evaluate"] and "--set" in words:
        words += ["--limit", "4"] * ("--limit" not in words)
        words += [f"model.call.{FEW_STEPS}"] * ("shapes" in words)
    if words[1:2] == ["explain"]:
        words += ["--redraws", "2", "--chains", "3"]
    said = io.StringIO()
    with redirect_stderr(said):
        status = cli.main(words[1:])
    return f"status {status}: {said.getvalue()}" if status else None


@pytest.mark.parametrize("page", cases(WITH_COMMANDS, [page for page in WITH_COMMANDS if "methods/" not in page]))
def test_the_commands_of_a_page_do_what_they_say(page, place, tiny_model, capfd):
    place(page)
    for command in SHOWN[page]:
        try:
            wrong = failed(command, tiny_model)
        except Exception as error:
            raise AssertionError(f"{command} failed") from error
        assert wrong is None, f"{command}\n{wrong}\n{capfd.readouterr().err}"


@pytest.mark.parametrize("page", [page for page in SHOWN if inline(page, (ROOT / page).read_text())])
def test_the_commands_within_sentences_have_the_options_that_they_name(page):
    for command in inline(page, (ROOT / page).read_text()):
        words = list(command.words[1:])
        try:
            with typer.main.get_command(cli.app).make_context("flowgrpo", words) as context:
                name, found, rest = context.command.resolve_command(context, list(words))
                found.make_context(name, rest, parent=context)
        except UsageError as error:  # a sentence may leave out what the command needs, or write N for a number
            if type(error).__name__ not in ("MissingParameter", "BadOptionUsage", "BadParameter"):
                raise AssertionError(str(command)) from error


def test_most_commands_are_found_and_a_third_is_run():
    every = [command for shown in SHOWN.values() for command in shown]
    assert len(every) > 120
    assert sum(why_checked(command) is None for command in every) > 40


def test_every_reason_and_every_word_is_used():
    every = [command for shown in SHOWN.values() for command in shown]
    unused = [pattern for pattern in CHECKED if not any(re.search(pattern, command.text) for command in every)]
    for page, put in WORDS.items():
        there = {word for command in SHOWN[page] for word in command.words}
        unused += [f"{page}: {word}" for word in put if word not in there]
    assert not unused


PLANTED = """
# A page

    flowgrpo train configs/shapes.yaml train.iteration=4
    flowgrpo plan configs/shapes.yaml --gpu-memroy 24
    flowgrpo gallery runs/absent
    flowgrpo grow
    flowgrpo train configs/shapes.yaml run.processes=2 \\
        algorithm='{preset: flow_grpo,
          kernel: swirl}'
    make tests

```sh
$ python research/compare_methods.py run OUT --secnods 3
torchrun --nnodez 4 -m flowgrpo train configs/shapes.yaml
C="train.group=3"; D="$C"
python research/compare_methods.py run OUT --methods a="awm $D"
```

```python
flowgrpo train nothing
```
"""


def test_each_wrong_command_of_a_planted_page_is_found(place, tiny_model):
    place("planted")
    shown = commands("planted", PLANTED)
    assert [command.line for command in shown] == [4, 5, 6, 7, 8, 11, 14, 15, 17]
    assert [str(command) for command in shown if not failed(command, tiny_model)] == []


def test_a_command_without_an_end_is_found():
    with pytest.raises(ValueError, match="planted:1: flowgrpo plan 'a has no end"):
        commands("planted", "    flowgrpo plan 'a\n\nand on")
