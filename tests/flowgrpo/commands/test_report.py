"""The report: what it says of planted runs, in numbers done by hand, and that nothing of a run can break it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from planted import node, tree
from planted_run import CONFIG, LINES, WILD, evaluated, run_of, trained, use, with_samples, with_trees

from flowgrpo.commands.inspect.watch import Watched
from flowgrpo.commands.report import write_report
from flowgrpo.commands.report.cost import cost
from flowgrpo.commands.report.curves import MOST, evaluations, total_curve
from flowgrpo.commands.report.extremes import extremes
from flowgrpo.commands.report.read import read
from flowgrpo.commands.report.signals import OfStep, by_step, signals
from flowgrpo.commands.report.spectrum import NO_SIBLINGS, NO_TREES, UNBRANCHED, Bar, Spectrum, spectrum
from flowgrpo.commands.report.watched import NONE, verdict
from flowgrpo.flow.methods.trees.tree import Branch, BranchWindow, Brush, Chain, Twigs, Window
from flowgrpo.training.reports.tree_store import TreeFolder
from samplers.kernels import Kernel
from samplers.trees import TRUNK

ROOT = Path(__file__).parents[3]


def test_what_it_cost_is_summed_by_phase():
    """Rollouts 4 + 4 s, updates 1 + 1, evaluations 5 + 5: 20 s."""
    found = cost(LINES)
    assert [(p.name, p.seconds, p.share, p.evaluations, p.decoded) for p in found.phases] == [
        ("rollout", 8.0, 40, 200, 40),
        ("update", 2.0, 10, 80, 0),
        ("evaluation", 10.0, 50, 100, 20),
    ]
    total = found.total
    assert (total.seconds, total.evaluations, total.decoded, total.time) == (20.0, 380, 60, "0:20")
    assert found.sentence == (
        "An iteration took 5.0 s on average. Rewards took 1.0 s, within the rollout. "
        "60 model evaluations had a backward pass. The most memory on one process was 1.50 GiB."
    )


def test_what_was_calibrated_has_a_line_and_nothing_costs_nothing():
    line = {"step": 0, "phase": "calibration", "time/calibration": 2.0, "cost/model_evaluations": 8, "cost/decoded": 4}
    only = cost([line])
    assert [(p.name, p.seconds, p.evaluations) for p in only.phases] == [("calibration", 2.0, 8)]
    assert (only.per_iteration, only.peak, only.sentence) == (None, None, "")
    assert cost([]) is None


def heights(svg, name):
    """How high the points of an element of some class lie, as shares of the height from the first to the last grid line."""
    start = svg.index(f'class="{name}"')
    points = svg[start:].partition('points="')[2].partition('"')[0]
    grid = [float(line.partition('y1="')[2].partition('"')[0]) for line in svg.split("<line")[1:]]
    ys = [float(point.partition(",")[2]) for point in points.split()]
    return [(max(grid) - y) / (max(grid) - min(grid)) for y in ys]


def test_curves_have_the_spread_of_what_they_are_the_mean_of():
    """Held out 0.2 and 0.5, each with 0.3 / sqrt(9); training 0.3 and 0.5, each with 0.1; the axis is from 0 to 0.6."""
    svg = total_curve(LINES)
    assert heights(svg, "band held-out") == pytest.approx([0.3 / 0.6, 1, 0.4 / 0.6, 0.1 / 0.6], abs=2e-3)
    assert heights(svg, "band train") == pytest.approx([0.4 / 0.6, 1, 0.4 / 0.6, 0.2 / 0.6], abs=2e-3)
    assert heights(svg, "held-out") == pytest.approx([0.2 / 0.6, 0.5 / 0.6], abs=2e-3)
    assert total_curve(LINES[:2]) is None


def test_the_table_of_evaluations_is_of_some_evenly_apart():
    found = evaluations(LINES, ["mine", "watched"])
    assert [(e.step, e.mean.value, round(e.mean.error, 9), e.parts) for e in found] == [
        (0, 0.2, 0.1, [0.2, 1.0]),
        (2, 0.5, 0.1, [0.5, 0.4]),
    ]
    many = evaluations([evaluated(step, None, 0.0) for step in range(111)], [])
    assert [each.step for each in many] == list(range(0, 111, 10))
    assert len(many) == MOST
    assert many[0].mean is None


def of_signals(lines, *, clips=True):
    return {signal.name: signal for signal in signals(lines, clips=clips)}


def test_signals_are_those_that_were_measured():
    found = of_signals(LINES)
    constant = ["clip fraction", "log-ratio", "drift", "learning rate"]
    assert [*found] == ["zero-variance groups", *constant[:3], "gradient norm", "learning rate", "lost samples"]
    assert found["gradient norm"].summary == ["1.00", "2.00", "3.00", "3.00"]
    assert found["zero-variance groups"].values == [(1, 0.5), (2, 0.25)]
    assert [name for name, signal in found.items() if signal.constant] == constant
    sides = of_signals([trained(1, 0.5, **{"policy/clip_fraction_high": 0.25, "policy/clip_fraction_low": 0.125})])
    assert sides["clip fraction above"].values == [(1, 0.25)]
    assert sides["clip fraction below"].values == [(1, 0.125)]


def test_ratio_and_kl_by_step_are_means_over_the_iterations_that_trained_on_it():
    ratio = "policy/mean_abs_log_ratio/step_{}".format
    lines = [
        trained(1, 0.5, **{ratio(2): 0.25, "policy/kl/step_2": 1.0, ratio(10): 0.5}),
        trained(2, 0.5, **{ratio(2): 0.75}),
    ]
    assert by_step(lines) == [OfStep(2, 0.5, 1.0), OfStep(10, 0.5, None)]
    assert by_step(LINES) == []


def test_a_ratio_that_is_always_zero_is_told_only_where_it_is_clipped():
    still = [trained(1, 0.5, **{"policy/clip_fraction": 0.0, "policy/mean_abs_log_ratio": 0.0})]
    for clips in (True, False):
        assert {"clip fraction", "log-ratio"} & of_signals(still, clips=clips).keys() == (
            {"clip fraction", "log-ratio"} if clips else set()
        )


def test_the_verdict_is_the_watch_s_own():
    lines = [evaluated(step, mean, -mean) for step, mean in ((0, 0.1), (2, 0.2), (4, 0.3))]
    found = verdict(lines, ["watched"], 2)
    assert [(each.name, each.first, each.last, each.streak) for each in found.watched] == [("watched", -0.1, -0.3, 2)]
    assert found.alarms == [
        "step 4: the reward rose and 'watched', which is only watched, fell 2 evaluations in a row; look at the samples, "
        "the reward may be exploited"
    ]
    calm = verdict(lines, ["watched"], 3)
    assert calm.alarms == []
    assert calm.sentence.startswith("No warning: no watched reward fell")
    assert verdict(lines[:1], ["watched"], 3).sentence.startswith("The watch compares evaluations")
    assert verdict(lines, [], 3).sentence == NONE


def test_the_spectrum_is_the_mean_of_the_trees_of_the_last_kept_iteration(tmp_path):
    """Siblings of step 1 have 0.9, 0.3 and 0.3 in one tree, 0.6 and 0.2 in the other; the earlier tree does not count."""
    other = tree([node(None, 0), node(0, 3, 0.6, noise=0.3), node(0, 3, 0.2, noise=0.3)], step=2, group=1)
    TreeFolder(tmp_path).write([tree([node(None, 0), *[node(0, 3, r, noise=0.3) for r in (0.0, 9.0)]], step=1)])
    TreeFolder(tmp_path).write([tree(step=2), other])
    found = spectrum(tmp_path, CONFIG)
    (bar,) = found.bars
    assert (bar.step, bar.level) == (1, "σ 1.00")
    assert bar.deviation == pytest.approx((np.std([0.9, 0.3, 0.3], ddof=1) + np.std([0.6, 0.2], ddof=1)) / 2)
    assert "mean of 2 trees of iteration 2" in found.sentence
    assert found.sentence.endswith("The noise of step 1 decides most.")
    assert f">{bar.deviation:.2f}</text>" in found.svg


def test_many_bars_have_few_labels():
    svg = Spectrum([Bar(step, "σ 0.50", 0.1) for step in range(1, 41)], "").svg
    assert svg.count("<rect") == 40
    assert re.findall(r">(\d+)</text>", svg) == [str(step) for step in range(1, 41, 4)]


def test_a_run_without_a_spectrum_says_how_to_have_one(tmp_path):
    brushes = {"kind": "flow", "algorithm": {"preset": "tempflow", "tree": {"name": "brush"}}}
    assert spectrum(tmp_path, brushes) == spectrum(tmp_path, {}) == Spectrum([], NO_TREES)
    TreeFolder(tmp_path).write([tree([node(None, 0), node(0, 3, 0.5, noise=0.3)])])
    assert spectrum(tmp_path, brushes) == Spectrum([], NO_SIBLINGS)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(
    ("kind", "preset", "shape", "instead"),
    [
        ("flow", "awm_fast", "chain", " flowgrpo explain RUN --prompt 0 shows what each step decides."),
        ("flow", "mix_grpo", "window", " flowgrpo explain RUN --prompt 0 shows what each step decides."),
        ("mdlm", "diffu_grpo", "chain", ""),  # explain is of noise
    ],
)
def test_a_run_of_chains_is_not_told_to_keep_trees(tmp_path, kept, kind, preset, shape, instead):
    if kept:
        TreeFolder(tmp_path).write([tree([node(None, 0), node(0, 3, 0.5, noise=0.3)])])
    found = spectrum(tmp_path, {"kind": kind, "algorithm": {"preset": preset, "tree": {"name": shape}}})
    assert found == Spectrum([], f"This section needs trees with branches; {preset} has chains.{instead}")


@pytest.mark.parametrize("shape", [Chain(), Window(), Twigs(), Brush(), Branch(), BranchWindow()])
def test_chains_are_the_trees_that_give_no_state_two_noisy_children(shape):
    plan = shape.plan([Kernel("flow_sde", 0.7)] * 8, 24, 0, 0)
    drawn = [sum(move.count for move in plan(TRUNK, step) if move.kernel.stochastic) for step in range(8)]
    assert (max(drawn) == 1) == (shape.name in UNBRANCHED)


def test_the_best_and_the_worst_are_of_the_last_step_by_what_is_trained_on_and_none_is_both(tmp_path):
    rewards = [0.5, None, 0.1, 0.9, 0.3, 0.8, 0.2, 0.7, 0.4, 0.6]
    found = extremes(with_samples(run_of(tmp_path / "r"), rewards), CONFIG)
    assert (found.step, found.count) == (2, 9)
    assert [card.samples[0].reward for card in found.best] == [0.9, 0.8, 0.7, 0.6]
    assert [card.samples[0].reward for card in found.worst] == [0.1, 0.2, 0.3, 0.4]
    assert [card.seed for card in found.best] == [3, 5, 7, 9]
    three = extremes(with_samples(run_of(tmp_path / "r"), [0.2, 0.2, 0.2]), CONFIG)
    assert sorted(card.seed for card in (*three.best, *three.worst)) == [0, 1, 2]
    one = extremes(with_samples(run_of(tmp_path / "s"), [0.2]), CONFIG)
    assert (len(one.best), len(one.worst)) == (1, 0)
    assert extremes(run_of(tmp_path / "t"), CONFIG) is None


def test_the_last_warnings_are_told_and_all_are_counted(tmp_path):
    report = read(run_of(tmp_path / "r", warnings=[f"warning {i}" for i in range(120)]))
    assert (report.warned, report.warnings[0], report.warnings[-1]) == (120, "warning 70", "warning 119")
    page = write_report(tmp_path / "r", tmp_path / "r.html").read_text()
    assert "<p>120 in log.txt, the last 50:</p>" in page


def test_the_page_tells_what_was_asked_and_with_what(tmp_path):
    page = write_report(run_of(tmp_path / "r"), tmp_path / "r.html").read_text()
    for label, text in (
        ("model", "shapes, float32"),
        ("weights", "LoRA rank 8"),
        ("call", "height 64"),
        ("method", "flow_grpo"),
        ("axes", "tree chain, kernel flow_sde, baseline group_mean, objective clip"),
        ("clip and KL", "clip range 0.0001, KL exact × 0.04"),
        ("rewards", "mine × 1"),
        ("watched only", "watched"),
        ("seeds", "run 7; held-out prompt i starts from seed i"),
        ("device", "a GPU, 2 processes"),
        ("packages", "flowgrpo 0.1.0, torch 2.9.0"),
        ("commit", "0123456789ab, with changes that were not committed"),
    ):
        assert f"<dt>{label}</dt><dd>{text}</dd>" in page
    assert "iteration 2 of 4" in page
    assert "preset: flow_grpo" in page


def test_a_run_that_has_just_begun_has_a_report_without_numbers(tmp_path):
    page = write_report(run_of(tmp_path / "r", []), tmp_path / "r.html").read_text()
    assert "no iteration yet" in page
    for section in ("curves", "signals", "cost", "samples"):
        assert f'<section id="{section}">' not in page


def test_the_page_is_self_contained_and_escapes_what_it_is_told(tmp_path):
    config = {**CONFIG, "eval_rewards": [{**use("a"), "name": WILD}], "model": {**CONFIG["model"], "path": WILD}}
    lines = [{**line, f"reward/{WILD}/mean": 0.5} for line in LINES]
    run = run_of(tmp_path / "r", lines, config=config, warnings=[WILD])
    with_trees(with_samples(run, [0.1, 0.2], prompts=[WILD, "a cat"]))
    page = write_report(run, tmp_path / "r.html").read_text()
    assert "alert(2)</script>" not in page
    assert "<img src=x" not in page
    assert "<script" not in page
    assert "http" not in page
    assert page.count('src="data:image/webp;base64,') == 2


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("metrics.jsonl", '{"step": 1}\n{"step": 2, "phase": "eval"}\n', "a line needs a step"),
        ("metrics.jsonl", '{"step": 2, "phase": "eval"}\n', "is not of a run"),
        ("config.yaml", "model: 3\n", "is not of a run"),
        ("config.yaml", "model: [\n", "config.yaml"),
        ("environment.json", "[]", "environment.json: it is not of a run"),
        ("environment.json", "{", "environment.json: not valid JSON"),
        ("samples/manifest.jsonl", '{"file": "a.png", "prompt": "x", "rewards": {"mine": 1}}\n', "there is no file"),
        ("trees/step-000001/0000.json", "{}", "it is not a tree that a run kept"),
    ],
)
def test_what_is_damaged_is_named_in_one_sentence(tmp_path, refused, file, text, said):
    run = run_of(tmp_path / "r")
    (run / file).parent.mkdir(parents=True, exist_ok=True)
    (run / file).write_text(text)
    assert said in refused("report", run)
    assert not (run / "report.html").exists()


@pytest.mark.parametrize(
    ("name", "said"), [("2-00.png", "2-00.png"), ("2-00.json", "is not a text as flowgrpo sample")]
)
def test_a_damaged_sample_is_named_in_one_sentence(tmp_path, refused, name, said):
    run = with_samples(run_of(tmp_path / "r"), [0.1])
    manifest = run / "samples/manifest.jsonl"
    manifest.write_text(manifest.read_text().replace("2-00.png", name))
    (run / "samples" / name).write_text('{"text": 1}')
    for file in ("r.html", "r.md"):
        assert said in refused("report", run, "--out", tmp_path / file)
    page = Watched(run).page()
    assert "The run cannot be read now" in page
    assert said in page


def test_the_command_writes_where_it_is_told(tmp_path, printed, refused):
    run = run_of(tmp_path / "r")
    assert printed("report", run) == f"{run / 'report.html'}\n"
    printed("report", run, "--out", tmp_path / "new/one.md")
    assert (tmp_path / "new/one.md").read_text().startswith("# Report of r\n")
    (tmp_path / "folder.md").mkdir()
    for name, said in (
        ("r.pdf", "--out: a report is written as .html or .md, and r.pdf ends in neither"),
        ("folder.md", "is there and no ordinary file"),
        ("/proc/none/r.html", "cannot be written to"),
    ):
        assert said in refused("report", run, "--out", tmp_path / name)


def test_a_report_needs_nothing_that_computes(tmp_path):
    run = with_trees(with_samples(run_of(tmp_path / "r"), [0.1, 0.2]))
    code = (
        "import json, sys; from flowgrpo.cli import main\n"
        f"statuses = [main(['report', {str(run)!r}, '--out', {str(tmp_path)!r} + name]) for name in ('/r.html', '/r.md')]\n"
        "import flowgrpo.commands.inspect.watch\n"
        "print(json.dumps([statuses, [m for m in ('torch', 'diffusers', 'transformers') if m in sys.modules]]))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(told.stdout.splitlines()[-1]) == [[0, 0], []]


def test_a_config_of_a_real_run_has_what_the_report_asks_for(tmp_path):
    from flowgrpo import config

    for name in ("shapes", "mdlm"):
        settings = config.load(ROOT / f"configs/{name}.yaml", [])
        run = run_of(tmp_path / name, config=yaml.safe_load(yaml.safe_dump(json.loads(settings.model_dump_json()))))
        facts = dict(read(run).asked)
        assert facts["method"] == settings.algorithm.preset
        assert facts["seeds"].startswith("run 0")
