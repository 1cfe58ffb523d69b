"""The door opens at once: what only looks, and what refuses, has not imported what computes."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from runs import CALL

from flowgrpo.cli import main
from flowgrpo.commands.scores import rewards as command
from flowgrpo.commands.terminal import GROUPS
from flowgrpo.schema.imports.lazy import lazy
from rewards import BUILT_IN
from rewards.base import find

HEAVY = ("torch", "diffusers", "transformers", "accelerate", "peft", "numpy", "scipy")
ROOT = Path(__file__).parents[2]
ASKED = """
import contextlib, io, json, sys
from flowgrpo.cli import main
with contextlib.redirect_stdout(io.StringIO()) as told, contextlib.redirect_stderr(told):
    statuses = [main(arguments) for arguments in json.loads(sys.argv[1])]
print(json.dumps({"statuses": statuses, "told": told.getvalue(), "modules": sorted(sys.modules)}))
"""


def asked(*commands):
    """Exit statuses, what was printed, and the modules that one process has imported after several commands."""
    run = subprocess.run(
        [sys.executable, "-c", ASKED, json.dumps(commands)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return json.loads(run.stdout.splitlines()[-1])


# Each task, and the import of its model's class alone, in a fork of one process that has imported what all of them take.
BEGUN = """
import importlib, json, os, sys
import accelerate, torch, transformers
from flowgrpo.cli import main
from flowgrpo.training.loop import Loop
def end(self):
    print("\\n" + json.dumps(sorted(sys.modules)), flush=True)
    os._exit(0)
Loop.run = end
for library, name, config in json.loads(sys.argv[1]):
    if not os.fork():
        getattr(importlib.import_module(library), name)
        end(None)
    os.wait()
    if not os.fork():
        os._exit(main(["train", config, "run.processes=1"]) or 1)
    os.wait()
"""


def test_looking_imports_nothing_that_computes():
    every = [["rewards", name] for name in BUILT_IN]
    found = asked(
        ["--help"],
        ["-h"],
        ["--version"],
        ["train", "-h"],
        ["rewards"],
        *every,
        ["methods"],
        ["methods", "tempflow"],
        ["methods", "--format", "json"],
        ["models"],
        ["models", "--format", "json"],
    )
    assert set(found["statuses"]) == {0}
    assert "Begin here" in found["told"]
    assert f"flowgrpo {version('flowgrpo')}\n" in found["told"]
    assert "StableDiffusion3Pipeline" in found["told"]
    assert not set(HEAVY) & set(found["modules"])


def test_without_a_command_the_help_has_every_command_in_a_group(capsys):
    assert main([]) == 0
    told, _ = capsys.readouterr()
    first, *others = (name for names in GROUPS.values() for name in names)
    assert told.index(f"\n  {first} ") < told.index(f"\n  {others[0]} ")
    listed = re.findall(r"^  (\w+) {2,}\S", told.partition("Begin here:")[2], re.MULTILINE)
    assert listed == [first, *others]
    assert "\nCommands:" not in told
    assert main(["mdlm"]) == 0
    assert "\n  tracelock " in capsys.readouterr().out


REFUSED = [
    (["plan", "configs/shapes.yaml", "train.iteratons=4"], "did you mean 'iterations'?"),
    (["plan", "configs/shapes.yaml", "algorithm.kernel=flow_sd"], "did you mean 'flow_sde'?"),
    (["plan", "configs/shapes.yaml", "algorithm.credit.within=siblings"], "algorithm.credit.within"),
    (["plan", "configs/shapes.yaml", "algorithm.baseline.ddof=2"], "algorithm.baseline.ddof"),
    (["train", "configs/shapes.yaml", "algorithm.preset=tempflow"], "train.group_size"),
    (["plan", "configs/shapes.yaml", "model.attention=sage"], "quantises"),
    (["plan", "configs/shapes.yaml", "train.groups=7", "train.updates=2"], "train.groups"),
    (["plan", "configs/shapes.yaml", "train.iterations"], "an override is written key=value"),
    (["plan", "configs/shape.yaml"], "no such config file, did you mean 'configs/shapes.yaml'?"),
    (["doctor", "configs/shapes.yaml", "run.seed=-1"], "run.seed"),
    (["plan", "configs/mdlm.yaml", "model.lenght=4"], "did you mean 'length'?"),
    (["plan", "configs/mdlm.yaml", "algorithm.objective=token_ration"], "did you mean 'token_ratio'?"),
    (["plan", "configs/mdlm.yaml", "algorithm.decoder=low_confidenc"], "did you mean 'low_confidence'?"),
    (["plan", "configs/mdlm.yaml", "algorithm.decoder.steps=0"], "algorithm.decoder.steps"),
    (["train", "configs/mdlm.yaml", "algorithm.decoder.committer={name: threshold, treshold: 0.9}"], "'threshold'"),
    (["plan", "configs/mdlm.yaml", "algorithm.decoder.region={name: blocks, block_length: 7}"], "does not divide"),
    (["plan", "configs/mdlm.yaml", "eval.decoder.cache=dul"], "eval.decoder.cache"),
    (
        ["plan", "configs/mdlm.yaml", "eval.decoder={cache: dual, cfg_scale: 1.0}"],
        "eval.decoder.cache: it goes neither",
    ),
    (["plan", "configs/mdlm.yaml", "eval.decoder.modifiers=gumbel"], "eval.decoder.modifiers: 'gumbel' is wrong"),
    (["plan", "configs/mdlm.yaml", "algorithm.aggregation=token_men"], "did you mean 'token_mean'?"),
    (
        [
            "plan",
            "configs/mdlm.yaml",
            "algorithm.decoder=scheduled",
            "algorithm.schedule={name: learned, start: {a: 1.0}}",
        ],
        "algorithm.schedule.start.a: unknown action",
    ),
    (
        ["plan", "configs/mdlm.yaml", "algorithm.decoder=trace_lock", "algorithm.decoder.scorer.controller=nowhere"],
        "algorithm.decoder.scorer.controller: there is no trained controller in nowhere",
    ),
    (["sample", "shapes", "--out", "nowhere"], "give either --prompt TEXT"),
    (["gallery", "no/such/run"], "there is no such folder"),
    (["evaluate", "shapes"], "--set: name an evaluation set"),
    (["evaluate", "shapes", "--set", "genevl"], "did you mean 'geneval'?"),
    (["report", "no/such/run"], "there is no such folder"),
    (["report", "docs"], "it is not a run's folder"),
    (["watch", "docs"], "it is not a run's folder"),
    (["gallery", "docs", "./docs"], "docs: this folder is named twice; name each run once"),
]


def test_refusing_imports_nothing_that_computes():
    found = asked(*(arguments for arguments, _ in REFUSED))
    lines = found["told"].splitlines()
    assert len(lines) == len(REFUSED)
    for (arguments, sentence), line in zip(REFUSED, lines, strict=True):
        assert sentence in line, (arguments, line)
    assert set(found["statuses"]) == {2}
    assert not set(HEAVY) & set(found["modules"])


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Of each task, the modules imported by its model's class, and by a run up to its first sample."""
    tasks = [("diffusers", "StableDiffusion3Pipeline", "shapes"), ("transformers", "LlamaForCausalLM", "mdlm")]
    arguments = [(library, name, str(ROOT / "configs" / f"{config}.yaml")) for library, name, config in tasks]
    run = subprocess.run(
        [sys.executable, "-c", BEGUN, json.dumps(arguments)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path_factory.mktemp("begun"),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    pictures, shapes, language, mdlm = (json.loads(line) for line in run.stdout.splitlines() if line.startswith("["))
    return {"shapes": (pictures, shapes), "mdlm": (language, mdlm)}


@pytest.mark.parametrize(
    ("task", "others"),
    [("shapes", ["flowgrpo.mdlm", "scipy.io.wavfile"]), ("mdlm", ["flowgrpo.flow", "diffusers", "peft"])],
)
def test_a_run_begins_without_what_it_does_not_use(begun, task, others):
    """Up to its first sample a run has imported neither the other wing nor what writes pages and sounds."""
    _, modules = begun[task]
    assert "flowgrpo.training.loop" in modules
    assert not [name for name in modules if name.startswith((*others, "flowgrpo.commands.page_parts"))]


@pytest.mark.parametrize("task", ["shapes", "mdlm"])
def test_a_run_imports_no_library_that_its_model_does_not(begun, task):
    of_model, of_run = ({name.partition(".")[0] for name in modules} for modules in begun[task])
    own = {"flowgrpo", "rewards", "samplers"}
    assert of_run - of_model - sys.stdlib_module_names <= own | {"onnxruntime"}  # by the loading of every pipeline


def test_the_scheduler_is_imported_by_who_asks_for_it():
    code = "import sys, samplers; print('FlowSDEScheduler' in samplers.__all__, 'diffusers' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout == "True False\n"
    import samplers

    assert samplers.FlowSDEScheduler.__mro__[1].__name__ == "FlowMatchEulerDiscreteScheduler"
    with pytest.raises(AttributeError, match="FlowSDESchedule"):
        _ = samplers.FlowSDESchedule


def test_a_lazy_module_is_the_module():
    colours = lazy("colorsys")
    sys.modules.pop("colorsys", None)
    assert "colorsys" not in sys.modules
    assert colours.rgb_to_hsv(1.0, 0.0, 0.0) == (0.0, 1.0, 1.0)
    assert "colorsys" in sys.modules
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = colours.no_such_name


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_source_says_of_a_reward_what_its_import_says(name):
    found, card = find(name), BUILT_IN[name]
    said, options = command._read_plugin(getattr(found, "func", found))
    assert command._read(card.target) == (said, options)


@pytest.mark.parametrize(
    ("name", "own", "of_its_base"), [("hpsv2", "version", "dtype"), ("video_ocr", "best", "threads")]
)
def test_the_options_of_a_reward_are_those_of_its_base_too(name, own, of_its_base):
    assert {own, of_its_base} <= command._read(BUILT_IN[name].target)[1].keys()


def test_the_python_entry_points(workplace, tiny_model):
    import flowgrpo

    run = flowgrpo.train("tiny.yaml", {"train.iterations": 1})
    assert run.folder == Path("runs/t")
    assert [line["phase"] for line in run.metrics] == ["eval", "train", "eval"]
    policy = flowgrpo.load_policy(str(tiny_model), dtype="bfloat16", call=CALL)
    samples = policy.sample(["a red circle"], seed=0)
    assert samples.shape == (1, 3, 16, 16)
    trained = run.policy.sample(["a red circle"], seed=0)
    last = json.loads(Path("runs/t/samples/manifest.jsonl").read_text().splitlines()[-2])
    assert trained[0, 0].mean().item() == pytest.approx(last["rewards"]["redness"], abs=1e-6)


@pytest.mark.parametrize("command", [["rewards"], ["init"]])
def test_lists_are_data_and_what_to_do_with_them_goes_to_stderr(capsys, command):
    assert main(command) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith(f"flowgrpo {command[0]} NAME ")
    assert captured.err.count("\n") == 1
    assert " NAME " not in captured.out
