"""Runs whose rollouts an engine makes, by command: they learn as others do, and say what becomes of the engine."""

import json
import math
import re

import fake_engine
import field
import pytest
import runs
import torch
from conftest import furnished

from flowgrpo.cli import main
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.flow.rollouts import rollout
from flowgrpo.flow.trainer import FlowWing
from flowgrpo.flow.updates.update import Credited
from flowgrpo_engine.asking import seed_of

LIGHT = ["eval={every: 9, prompts: 1, save: 0}", "train.iterations=3", "train.updates=1"]
TWICE = "train.iterations=2"  # the second time by adapters that were pushed


@pytest.fixture
def engine(tiny_model):
    return fake_engine.FakeEngine(tiny_model, **runs.CALL)


@pytest.fixture
def serving(engine, workplace):
    """The address of an engine of the workplace's model, and a function that ends it."""
    with fake_engine.serving(engine) as served:
        yield served


def options(url, **more):
    section = {"url": url, "untold": ["max_sequence_length"], "retries": 0, "timeout": 30, **more}
    return [f"run.engine={json.dumps(section)}", *LIGHT]


def trained(folder, step=2):
    return {name: tensor for name, tensor in runs.weights(folder, step).items() if not name.startswith("average.")}


@pytest.fixture(scope="module")
def alone(tiny_model, tmp_path_factory):
    """The folder of a run by one process, which asks an engine of its own."""
    engine = fake_engine.FakeEngine(tiny_model, **runs.CALL)
    with furnished(tmp_path_factory.mktemp("alone"), tiny_model) as folder, fake_engine.serving(engine) as (url, _):
        assert main(["train", "tiny.yaml", *options(url), TWICE, "run.name=one"]) == 0
    return folder / "runs" / "one"


def test_a_run_learns_what_one_learns_that_draws_the_engines_noise_itself(workplace, alone, monkeypatch):
    """The engine computes with merged weights and formulas of its own: all but rounding is the same."""
    generators = {}

    def start(self, rows):
        drawn = []
        for row in rows:
            generators[row.seed] = fake_engine.generator_of(row.seed)
            drawn.append(torch.randn((4, 8, 8), generator=generators[row.seed]))
        return (torch.stack(drawn),)

    def noise(shape, seed, _, iteration, group, path, step, component):
        return torch.randn(tuple(shape), generator=generators[seed_of(seed, iteration, group) + path[0]])

    def row_at(self, iteration, groups, group, index):
        prompt = self.run.train_prompts[groups.prompts[group]]
        return rollout.Row(prompt.text, seed_of(self.config.run.seed, iteration, group) + index, prompt.columns)

    real, own = DiffusersPolicy.start, FlowWing.rollout

    def rolled(self, iteration, groups):
        with monkeypatch.context() as patched:
            patched.setattr(DiffusersPolicy, "start", start)
            patched.setattr(rollout.noise, "noise", noise)
            return own(self, iteration, groups)

    monkeypatch.setattr(FlowWing, "rollout", rolled)
    monkeypatch.setattr(FlowWing, "_row_at", row_at)
    assert main(["train", "tiny.yaml", *LIGHT, TWICE, "run.name=here"]) == 0
    assert DiffusersPolicy.start is real
    here = workplace / "runs" / "here"
    ours, theirs = trained(here), trained(alone)
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=2e-4)  # steps of Adam are 0.01
    for left, right in zip(runs.metrics(here), runs.metrics(alone), strict=True):
        assert right["reward/mean"] == pytest.approx(left["reward/mean"], abs=1e-5)
        assert right["policy/max_abs_log_ratio"] == 0  # the update replays what was scored here
        assert right["engine/max_abs_log_ratio"] < 2e-6
        assert right["engine/effective_samples_joint"] > 0.999999
        assert right["engine/truncated_fraction"] == 0


def test_the_plan_counts_what_the_run_does_and_files_of_old_weights_are_gone(workplace, serving, engine, capsys):
    url, _ = serving
    chosen = [*options(url), "algorithm.preset=flow_grpo_fast", "algorithm.tree={size: 1, steps: [0, 2]}"]
    assert main(["plan", "tiny.yaml", *chosen, "--format", "json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert main(["train", "tiny.yaml", *chosen]) == 0
    for line in runs.metrics(workplace / "runs/t"):
        assert line["cost/rollout_evaluations"] == planned["model_evaluations"]["rollout"] == 8
        assert line["cost/update_evaluations"] == planned["model_evaluations"]["update"]
        assert line["cost/decoded"] == planned["decoded"] == 8
    asked = [body for path, body in engine.asked if path == "/rollout/generate"]
    assert {len(body["rollout_return_step_indices"]) for body in asked} == {2}
    assert {body["num_outputs_per_prompt"] for body in asked} == {1, 4}  # of the trial, and of groups
    assert [file.stem for file in (workplace / "runs/t/engine").iterdir()] == [engine.merged]


def test_the_correction_multiplies_the_loss_and_its_mean_does_not_divide_by_it(tmp_path):
    run = field.trainer(field.settings(tmp_path))
    whole = field.credit(run, run.rollout(0, run.groups(0)))

    def gradients(correction):
        given = {name: getattr(whole, name) for name in Credited.__dataclass_fields__}
        field.step_in_place(run, Credited(**given | {"correction": correction}))
        return torch.cat([p.grad.flatten() for p in run.weights.parameters])

    plain, doubled = gradients(None), gradients(torch.full((len(whole.tree.nodes),), 2.0).double())
    assert plain.norm() > 0
    torch.testing.assert_close(doubled, 2 * plain)
    alone = torch.zeros(len(whole.tree.nodes)).double()
    alone[whole.tree.evaluations[0].trained[0].nodes] = 1.0
    assert 0 < gradients(alone).norm() < plain.norm()


def test_an_engine_that_is_lost_ends_the_run_with_what_is_done_and_a_resume_goes_on(
    workplace, serving, engine, tiny_model, capsys
):
    url, end = serving
    real = engine.rollout

    def rollout(body):
        if sum(path == "/rollout/generate" for path, _ in engine.asked) > 1 + 2:
            threading_end.append(True)
            raise OSError("gone")
        return real(body)

    threading_end = []
    engine.rollout = rollout
    rest = ["run.checkpoint.every=5", "train.iterations=2"]
    chosen = [*options(url), *rest]
    assert main(["train", "tiny.yaml", *chosen]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.match(
        rf"stopped after step 1: {url}/rollout/generate could not be reached \(.+\); check that its server runs; "
        r"a checkpoint is written, go on with: flowgrpo train tiny.yaml .*run.resume=true$",
        said,
    )
    assert threading_end
    assert [line["step"] for line in runs.metrics(workplace / "runs/t")] == [1]
    end()
    assert main(["train", "tiny.yaml", *chosen, "run.resume=true"]) == 2  # nobody is there
    assert "flowgrpo: run.engine.url:" in capsys.readouterr().err
    with fake_engine.serving(fake_engine.FakeEngine(tiny_model, **runs.CALL)) as (other, _):
        assert main(["train", "tiny.yaml", *options(other), *rest, "run.resume=true"]) == 0
    assert [line["step"] for line in runs.metrics(workplace / "runs/t")] == [1, 2]
    assert runs.metrics(workplace / "runs/t")[-1]["engine/max_abs_log_ratio"] < 2e-6


@pytest.mark.parametrize("evaluators", [pytest.param(0, marks=pytest.mark.zoo), 1])
def test_two_processes_ask_for_their_own_samples_and_learn_as_one(workplace, serving, alone, evaluators):
    url, _ = serving
    beside = ["run.processes=2", f"run.evaluators={evaluators}", "run.name=two"]
    process = runs.background("train", "tiny.yaml", *options(url), TWICE, *beside)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    together = workplace / "runs" / "two"
    two = trained(together)
    for name, tensor in trained(alone).items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=2e-4)
    left, right = (runs.metrics(folder)[-1] for folder in (alone, together))
    assert right["cost/rollout_evaluations"] == left["cost/rollout_evaluations"]
    assert right["engine/mean_weight"] == pytest.approx(left["engine/mean_weight"])


def test_an_engine_that_is_lost_to_one_of_two_processes_ends_both_in_a_sentence(workplace, serving, engine):
    url, _ = serving
    real, asked = engine.rollout, []

    def rollout(body):
        asked.append(body)
        return [] if len(asked) == 2 + 2 + 1 else real(body)  # the trials, an iteration of two groups, and the first

    engine.rollout = rollout
    chosen = [*options(url), "run.processes=2"]
    process = runs.background("train", "tiny.yaml", *chosen)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 1, err
    said = err.splitlines()[-1]
    assert re.search("stopped after step 1: .*answered with 0 samples instead of 4; a checkpoint is written", said)


def test_an_engine_that_skips_a_push_ends_the_run_before_it_learns_from_old_weights(workplace, serving, engine, capsys):
    """Its numbers are off, too: weights are cut, and the run says so."""
    url, _ = serving
    engine.skips_pushes, engine.offset = True, -1.5
    assert main(["train", "tiny.yaml", *options(url, truncate=1.25)]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.match(
        rf"stopped after step 1: {url} answered that it merged t-transformer-\w+, but the checksum of its",
        said,
    )
    assert (workplace / "runs/t/checkpoints/step-000001").is_dir()
    (line,) = runs.metrics(workplace / "runs/t")
    assert line["engine/mean_abs_log_ratio"] == pytest.approx(1.5, abs=1e-5)
    assert (line["engine/truncated_fraction"], line["engine/mean_weight"]) == (1.0, pytest.approx(1.25))
    assert line["policy/max_abs_log_ratio"] == 0
    log = (workplace / "runs/t/log.txt").read_text()
    assert (
        "step 1: the engine's log-probabilities are 1.5 nats per dimension from the trainer's; check that both use"
        in log
    )


def test_before_the_first_step_a_lost_engine_is_told_without_a_checkpoint(workplace, serving, engine, capsys):
    url, _ = serving
    real = engine.rollout
    engine.rollout = lambda body: real(body) if body["num_outputs_per_prompt"] == 1 else []
    assert main(["train", "tiny.yaml", *options(url)]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "stopped after step 0: " in said
    assert "answered with 0 samples instead of 4; there is no checkpoint, begin again with: " in said


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (
            ["algorithm.preset=tempflow", "train.group_size=6"],
            "algorithm.tree: an engine samples chains without branches; take chain or window",
        ),
        (
            ["run.engine.untold=[]"],
            "model.call.max_sequence_length: an engine takes no such argument",
        ),
        (
            ["algorithm.kernel=dance_sde"],
            "algorithm.kernel: an engine cannot sample with dance_sde; take flow_sde or cps",
        ),
        (["run.engine.timout=3"], "run.engine.timout"),
        (["run.engine.truncate=0.5"], "run.engine.truncate"),
        (
            ["run.engine.url=http://127.0.0.1:9"],
            "run.engine.url: http://127.0.0.1:9/v1/list_loras could not be reached",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_the_model_is_loaded(workplace, chosen, said, capsys):
    section = "run.engine={url: 'http://127.0.0.1:9', untold: [max_sequence_length], retries: 0}"
    assert main(["train", "tiny.yaml", section, *chosen]) == 2
    assert f"flowgrpo: {said}" in capsys.readouterr().err
    assert not (workplace / "runs").exists()


def test_an_engine_of_another_schedule_is_refused_before_the_run_begins(workplace, serving, engine, capsys):
    url, _ = serving
    engine.policy.walk.scheduler.set_shift(1.0)
    engine.policy.walk._sigmas = None
    assert main(["train", "tiny.yaml", *options(url)]) == 2
    assert re.search(
        r"run.engine: http://.* used other sigmas than the pipeline, .*; start it with the same shift",
        capsys.readouterr().err,
    )
    assert not (workplace / "runs/t/metrics.jsonl").exists()
    assert math.isfinite(engine.policy.sigmas[0])
