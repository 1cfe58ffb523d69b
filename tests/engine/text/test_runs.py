"""Runs whose texts an engine decodes, by command: they learn as others do, and say what becomes of the engine."""

import json
import re
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path

import fake_engine
import pytest
import runs
import torch
from fake_text_engine import FakeTextEngine

from flowgrpo.cli import main
from flowgrpo.mdlm import trainer, update
from flowgrpo.mdlm.policy import TextPolicy
from flowgrpo_engine.asking import seed_of

RUN = """
kind: mdlm
model: {path: digits, length: 12, lora: {rank: 2, alpha: 6}}
prompts: {train: prompts.txt, eval: prompts.txt}
rewards: [{use: './mine.py:ones'}]
algorithm: {preset: cj_grpo, decoder: {name: low_confidence, steps: 6, region: {block_length: 4}, eos_early_stop: true}}
train: {iterations: 3, groups: 2, group_size: 4, updates: 1, learning_rate: 0.01, micro_batch: 8, ema: null}
eval: {every: 9, prompts: 1, save: 0, decoder: {name: low_confidence, steps: 1}}
run: {name: t, checkpoint: {every: 1}}
"""


DECODER = {"name": "low_confidence", "steps": 6, "region": {"block_length": 4}}


@pytest.fixture
def engine():
    return FakeTextEngine(DECODER)


@contextmanager
def furnished(folder):
    """A folder with a small run on the embedded model, in which commands run."""
    (folder / "mine.py").write_text(
        "def ones(texts, prompts):\n    return [sum(c in '135' for c in text) / 9 for text in texts]\n"
    )
    (folder / "prompts.txt").write_text("25,7,3=21:\n1,2,3=6:\n")
    (folder / "run.yaml").write_text(RUN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


@pytest.fixture
def serving(engine, tmp_path):
    """The address of an engine of the embedded model, and a function that ends it; a folder with a small run on it."""
    with furnished(tmp_path), fake_engine.serving(engine) as served:
        yield served


def options(url, **more):
    section = {"url": url, "retries": 0, "timeout": 30, **more}
    return [f"run.engine={json.dumps(section)}"]


def folder(name="t"):
    return Path("runs") / name


def trained(name, step=2):
    return runs.weights(folder(name), step)


def asking(place, engine):
    """The folder of a run by one process in a place, which asks an engine of its own."""
    with furnished(place), fake_engine.serving(engine) as (url, _):
        assert main(["train", "run.yaml", *options(url, log_probs=True), "train.iterations=2"]) == 0
    return place / "runs" / "t"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder of a run whose engine counts steps by block."""
    return asking(tmp_path_factory.mktemp("alone"), FakeTextEngine(DECODER))


def generate_with_the_engines_seeds(monkeypatch):
    """Rollouts of this program draw from the seeds that an engine is told."""
    real = TextPolicy.generate

    def told(seed):
        return (seed_of(seed[0], *seed[2:4]) + seed[4],) if len(seed) == 5 and seed[1] == "answer" else seed

    def generate(self, texts, decoder, seeds, micro_batch, **given):
        return real(self, texts, decoder, list(map(told, seeds)), micro_batch, **given)

    monkeypatch.setattr(TextPolicy, "generate", generate)


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """The folder of the run that draws an engine's noise itself."""
    place = tmp_path_factory.mktemp("here")
    with furnished(place), pytest.MonkeyPatch.context() as patch:
        generate_with_the_engines_seeds(patch)
        assert main(["train", "run.yaml", "train.iterations=2", "run.name=here"]) == 0
    return place / "runs" / "here"


@pytest.fixture(scope="module")
def over_all(tmp_path_factory):
    """The folder of a run whose engine counts steps over all blocks."""
    engine = FakeTextEngine(DECODER)
    engine.over_all = True
    return asking(tmp_path_factory.mktemp("over-all"), engine)


@pytest.mark.parametrize("by_engine", ["alone", pytest.param("over_all", marks=pytest.mark.zoo)])
def test_a_run_learns_what_one_learns_that_draws_the_engines_noise_itself(here, by_engine, request):
    """The engine has merged weights, the second time by adapters that were pushed: all but rounding is the same."""
    asked = request.getfixturevalue(by_engine)
    ours, theirs = (runs.weights(each, 2) for each in (here, asked))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=2e-4)  # steps of Adam are 0.01
    both = (runs.metrics(each) for each in (here, asked))
    for left, right in zip(*both, strict=True):
        assert right["reward/mean"] == pytest.approx(left["reward/mean"], abs=1e-6)
        assert right["reward/std"] > 0
        assert right["policy/max_abs_log_ratio"] < 1e-5
        assert right["engine/max_abs_log_ratio"] < 1e-4
        assert right["engine/effective_samples_joint"] > 0.9999
        assert right["engine/truncated_fraction"] == 0
        assert right["cost/update_evaluations"] == left["cost/update_evaluations"]


def test_the_plan_counts_what_the_run_does_and_each_rollout_has_the_adapters_of_its_iteration(serving, engine, capsys):
    """The files of old weights are gone."""
    url, _ = serving
    whole = "algorithm.decoder={name: low_confidence, steps: 6, region: {block_length: 4}}"
    engine.over_all = True
    assert main(["plan", "run.yaml", *options(url), whole, "--format", "json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert main(["train", "run.yaml", *options(url, samples=3), whole]) == 0
    for line in runs.metrics(folder()):
        assert line["cost/rollout_evaluations"] == planned["model_evaluations"]["rollout"] == 8 * 6
        assert line["cost/update_evaluations"] == planned["model_evaluations"]["update"]
        assert "engine/mean_abs_log_ratio" not in line  # nobody asked for log-probabilities
    asked = [body for path, body in engine.asked if path == "/generate"]
    assert sorted(len(body["rid"]) for body in asked) == [1] + [1] * 6 + [3] * 6  # of the trial, and of groups
    assert all(each["ignore_eos"] for body in asked for each in body["sampling_params"])
    assert [each.name for each in (folder() / "engine").iterdir()] == list(engine.loaded)
    assert len(engine.loaded) == 1
    names = [body.get("lora_path", [None])[0] for body in asked]
    trial, first, second, third = names[0], {*names[1:5]}, {*names[5:9]}, {*names[9:13]}
    assert (trial, first) == (None, {None})  # new adapters change nothing
    assert len(first | second | third) == 3
    loads = [body["lora_name"] for path, body in engine.asked if path == "/load_lora_adapter"]
    assert [{name} for name in loads] == [second, third]
    assert [body["lora_name"] for path, body in engine.asked if path == "/unload_lora_adapter"] == loads[:1]


def test_where_nobody_needs_our_log_probabilities_nothing_is_scored(serving, engine, capsys):
    url, _ = serving
    chosen = [*options(url), "algorithm.preset=diffu_grpo", "train.iterations=1"]
    assert main(["plan", "run.yaml", *chosen, "--format", "json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert (planned["model_evaluations"]["rollout"], planned["at_most"]["rollout"]) == (0, False)
    assert main(["train", "run.yaml", *chosen]) == 0
    (line,) = runs.metrics(folder())
    assert line["cost/rollout_evaluations"] == 0
    assert line["cost/update_evaluations"] == planned["model_evaluations"]["update"] > 0


def test_where_the_engines_numbers_are_off_weights_are_cut_and_the_run_says_so(serving, engine):
    url, _ = serving
    engine.offset = -1.5
    assert main(["train", "run.yaml", *options(url, log_probs=True, truncate=1.25), "train.iterations=1"]) == 0
    (line,) = runs.metrics(folder())
    assert line["engine/mean_abs_log_ratio"] == pytest.approx(1.5, abs=1e-4)
    assert (line["engine/truncated_fraction"], line["engine/mean_weight"]) == (1.0, pytest.approx(1.25))
    assert line["policy/max_abs_log_ratio"] < 1e-5
    said = (folder() / "log.txt").read_text()
    assert (
        "step 1: the engine's log-probabilities are 1.5 nats per token from the trainer's; check that both use" in said
    )


def test_an_engine_that_computes_nothing_with_what_was_pushed_is_seen_by_its_log_probabilities(serving, engine):
    url, _ = serving
    engine.ignores_adapters = True
    chosen = [*options(url, log_probs=True), "train.iterations=2"]
    assert main(["train", "run.yaml", *chosen, "train.learning_rate=0.05"]) == 0
    first, last = runs.metrics(folder())
    assert first["engine/mean_abs_log_ratio"] < 1e-5
    assert last["engine/mean_abs_log_ratio"] > 0.01
    assert "nats per token from the trainer's" in (folder() / "log.txt").read_text()


def lose(engine, after, monkeypatch):
    """Let an engine fail once it was asked for so many requests."""
    real, count = engine.complete, []

    def complete(body):
        count.append(body)
        if len(count) > after:
            raise OSError("gone")
        return real(body)

    monkeypatch.setattr(engine, "complete", complete)


def test_an_engine_that_is_lost_ends_the_run_with_what_is_done_and_a_resume_goes_on(
    serving, alone, engine, monkeypatch, capsys
):
    url, end = serving
    rest = ["run.checkpoint.every=5", "train.iterations=2"]
    chosen = [*options(url, log_probs=True), *rest]
    lose(engine, 1 + 2, monkeypatch)
    assert main(["train", "run.yaml", *chosen]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    lost = rf"stopped after step 1: {url}/generate could not be reached \(.+\); check that its server runs; "
    assert re.match(rf"{lost}a checkpoint is written, go on with: flowgrpo train run.yaml .*run.resume=true$", said)
    assert [line["step"] for line in runs.metrics(folder())] == [1]
    end()
    assert main(["train", "run.yaml", *chosen, "run.resume=true"]) == 2  # nobody is there
    assert f"flowgrpo: run.engine.url: {url}/v1/models could not be reached" in capsys.readouterr().err
    other = FakeTextEngine(engine.decoder)
    with fake_engine.serving(other) as (there, _):
        assert main(["train", "run.yaml", *options(there, log_probs=True), *rest, "run.resume=true"]) == 0
    assert [line["step"] for line in runs.metrics(folder())] == [1, 2]
    whole, parts = runs.weights(alone, 2), trained("t")  # this engine draws the same from the same seeds
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=0, atol=2e-4)


def test_an_engine_that_skips_a_push_ends_the_run_before_it_learns_from_old_weights(serving, engine, capsys):
    url, _ = serving
    engine.skips_pushes = True
    assert main(["train", "run.yaml", *options(url)]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    pushed = (
        rf"stopped after step 1: {url} has the adapters none instead of the ones that the run sent, model: t-model-\w+"
    )
    assert re.match(pushed, said)
    assert (folder() / "checkpoints/step-000001").is_dir()


@pytest.mark.parametrize("evaluators", [pytest.param(0, marks=pytest.mark.zoo), 1])
def test_two_processes_ask_for_their_own_texts_and_learn_as_one(serving, alone, evaluators):
    url, _ = serving
    chosen = [*options(url, log_probs=True), "train.iterations=2"]
    beside = ["run.processes=2", f"run.evaluators={evaluators}", "run.name=two"]
    process = runs.background("train", "run.yaml", *chosen, *beside)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    one, two = runs.weights(alone, 2), trained("two")
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-3)  # of two steps of 0.01
    left, right = (runs.metrics(each)[-1] for each in (alone, folder("two")))
    assert right["cost/rollout_evaluations"] == left["cost/rollout_evaluations"]
    assert right["engine/mean_weight"] == pytest.approx(left["engine/mean_weight"])


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (["run.engine.timout=3"], "run.engine.timout"),
        (
            ["algorithm.preset=igpo"],
            "algorithm.hints: an engine cannot start from given tokens of an answer; take none",
        ),
        (["model.lora=null"], "model.lora: an engine gets adapters, not whole networks; give it a rank"),
        ([], "run.engine.url: http://127.0.0.1:9/v1/models could not be reached"),
    ],
)
def test_what_cannot_be_is_refused_before_the_model_is_loaded(serving, chosen, said, capsys):
    assert main(["train", "run.yaml", "run.engine={url: 'http://127.0.0.1:9', retries: 0}", *chosen]) == 2
    assert f"flowgrpo: {said}" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_an_engine_that_tells_no_steps_is_refused_before_the_run_begins(serving, engine, capsys):
    url, _ = serving
    engine.edit = lambda answers: [each["meta_info"].pop("step_maps") for each in answers] and answers
    assert main(["train", "run.yaml", *options(url)]) == 2
    assert f"run.engine: {url} at /generate sent no meta_info.step_maps, the step of each" in capsys.readouterr().err
    assert not (folder() / "metrics.jsonl").exists()


def test_the_correction_multiplies_the_gradient_and_its_mean_does_not_divide_by_it(serving, engine, monkeypatch):
    url, _ = serving
    Path("prompts.txt").write_text("=,,1:\n:=0\n")  # senseless: more than one token of an answer is in doubt
    found, real = [], update.update_on

    def gradient(weights, stats, **options):
        found.append(torch.cat([p.grad.flatten() for p in weights.parameters]))

    def update_on(config, policy, update_batch, batch, **options):
        every = torch.full_like(update_batch.correction, 0.5)
        first = every.clone()
        first[:, 1:] = 0.0
        for correction in (None, every, first, every - first):
            stats = real(config, policy, replace(update_batch, correction=correction), batch, **options)
        return stats

    monkeypatch.setattr(update, "optimizer_step", gradient)
    monkeypatch.setattr(trainer, "update_on", update_on)
    assert main(["train", "run.yaml", *options(url, log_probs=True), "train.iterations=1", "run.patience=null"]) == 0
    plain, halved, first, later = found
    torch.testing.assert_close(halved, plain / 2)
    torch.testing.assert_close(first + later, halved, rtol=0, atol=1e-5 * float(halved.abs().max()))
    assert min(first.norm(), later.norm()) > 0.1 * halved.norm()
    assert torch.cosine_similarity(first, later, dim=0) < 0.5  # no factor of all tokens of an answer


def test_the_server_of_the_page_rolls_out_for_a_run(serving, monkeypatch):
    """All of it but its last line, which serves it at a port that may be taken."""
    page = (Path(__file__).parents[3] / "docs/research/engines.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "HTTPServer" in block)
    *lines, last = code.strip().splitlines()
    assert last.startswith("HTTPServer(")
    names = {}
    monkeypatch.setattr("sys.argv", ["text_engine.py", "digits", "0"])
    exec("\n".join(lines), names)
    server = ThreadingHTTPServer(("127.0.0.1", 0), names["Handler"])
    monkeypatch.setattr(names["Handler"], "log_message", lambda *words: None)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    whole = "algorithm.decoder={name: low_confidence, eos_early_stop: true}"
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        chosen = [*options(url, log_probs=True, requests=1), whole, "train.iterations=2", "train.group_size=3"]
        assert main(["train", "run.yaml", *chosen]) == 0
    finally:
        server.shutdown()
        server.server_close()
    for line in runs.metrics(folder()):
        assert line["engine/max_abs_log_ratio"] < 1e-4
    assert names["loaded"].keys() > {None}
