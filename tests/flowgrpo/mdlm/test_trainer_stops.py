"""A run of texts whose model diverges or whose reward dies says so and stops, and what it had learnt before is kept."""

import math
import re
import shlex
import threading
from contextlib import ExitStack

import pytest
import torch
from fakes import http_server
from runs import metrics, weights

from flowgrpo.cli import main
from flowgrpo.commands.runs import train as run
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from flowgrpo.training.run.stop_reasons import Broken, Diverged, NothingToLearn
from flowgrpo.training.weights.trained_weights import Weights
from rewards.served.wire import decode


def broken(monkeypatch, method, when=lambda: True):
    """Logits are not numbers, of a method of the predictor, after two updates."""
    real = getattr(MaskPredictor, method)
    begun = []

    def logits(self, *arguments, **options):
        found = real(self, *arguments, **options)
        factor = math.nan if len(begun) > 1 and when() else 1.0
        return found * factor if isinstance(found, torch.Tensor) else (found[0] * factor, *found[1:])

    monkeypatch.setattr(MaskPredictor, method, logits)
    updates = Weights.after_update
    monkeypatch.setattr(Weights, "after_update", lambda self: (updates(self), begun.append(1))[0])


LOST = "32 of 32 answers have a log-probability that is not finite and are dropped"
UNTRAINED = "32 of 32 answers have a log-probability that is not finite and are not trained on"


@pytest.mark.parametrize(
    ("method", "when", "why", "told"),
    [
        ("logits_at", torch.is_grad_enabled, "no update had a finite gradient", []),
        ("logits_at", lambda: True, "none of its samples can be trained on", [UNTRAINED]),
        ("logits_and_hidden", lambda: True, "every sample was lost", [LOST]),
    ],
)
def test_a_model_of_texts_that_diverges_has_nothing_to_learn(settings, monkeypatch, method, when, why, told):
    broken(monkeypatch, method, when)
    chosen = settings(
        algorithm__preset="diffu_grpo",
        train={"iterations": 6, "groups": 4, "group_size": 8, "updates": 1, "passes": 2, "micro_batch": 32},
        eval__every=9,
        run__patience=2,
        run__checkpoint={"every": 1, "keep": 1},
    )
    said = f"^stopped after step 3: nothing to learn since step 1, {why}$"
    with pytest.raises(NothingToLearn, match=said) as stopped:
        run.train_config(chosen)
    assert (stopped.value.status, stopped.value.rest) == (1, "go on from step 1, the last that was sound,")
    heard = [line.split(" ", 2)[2] for line in (chosen.run.folder / "log.txt").read_text().splitlines()]
    assert set(heard) == {*told, *(f"step {step}: nothing to learn, {why}" for step in (2, 3))}
    assert [line["policy/updates"] for line in metrics(chosen.run.folder)] == [2, 0, 0]
    kept = sorted(path.name for path in (chosen.run.folder / "checkpoints").iterdir())
    assert kept == ["step-000001", "step-000003"]


def test_a_run_of_texts_that_diverges_before_its_patience_is_out_does_not_end_well(settings, monkeypatch):
    broken(monkeypatch, "logits_at", torch.is_grad_enabled)
    choices = {"algorithm__preset": "diffu_grpo", "train__updates": 1, "train__iterations": 3, "eval__every": 9}
    with pytest.raises(Broken, match="^ended after step 3: no update had a finite gradient$") as stopped:
        run.train_config(settings(**choices, run__patience=9, run__checkpoint={"every": 1, "keep": 1}))
    ended = stopped.value
    assert (ended.status, ended.rest) == (1, "go on from step 2, the last that was sound,")
    assert ended.overrides == ("run.resume=true",)


def test_texts_go_on_from_before_the_weights_were_no_numbers(settings, monkeypatch):
    choices = {"train__iterations": 4, "train__updates": 1, "run__checkpoint": {"every": 1, "keep": 1}}
    choices |= {"eval__every": 9, "eval__prompts": 1, "eval__save": 0}
    whole = run.train_config(settings(run__name="whole", **choices))
    real = Weights.after_update

    def after_update(self):
        real(self)
        if self.updates == 3:
            self.parameters[0].data.fill_(math.inf)

    with monkeypatch.context() as patched:
        patched.setattr(Weights, "after_update", after_update)
        with pytest.raises(Diverged, match="^stopped after step 3: the trained weights are not finite$") as stopped:
            run.train_config(settings(run__name="parts", **choices))
    assert (stopped.value.status, stopped.value.rest) == (1, "go on from step 2, the last that was sound,")
    parts = run.train_config(settings(run__name="parts", run__resume=True, **choices))
    one, other = (weights(done.folder, 4) for done in (whole, parts))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def vowels(asked):
    """The answers of a server of the reward of the same name in conftest.py."""
    if asked.path == "/health":
        return {"rewards": {"vowels": {"group_wise": False, "columns": []}}, "max_bytes": 1 << 20}
    return {"rewards": [sum(c in "ae" for c in text) / 4 for text in decode(bytearray(asked.body)).samples]}


def test_a_run_whose_reward_server_dies_stops_and_goes_on_when_it_is_back(settings, tmp_path, capsys):
    """As if the server had never been away."""
    path = str(tmp_path / "run.yaml")
    options = ["train.iterations=4", "train.updates=1", "eval={every: 9, prompts: 1, save: 0}", "run.patience=2"]
    assert main(["train", path, *options, "run.name=whole"]) == 0
    folder, life = tmp_path / "runs" / "served", ExitStack()

    def mortal(asked):
        if not (folder / "metrics.jsonl").exists() or '"train"' not in (folder / "metrics.jsonl").read_text():
            return vowels(asked)
        threading.Thread(target=life.close).start()
        return 500, b""

    url = life.enter_context(http_server(mortal))
    options += ["run.name=served", f"rewards=[{{use: '{url}/vowels', options: {{timeout: 2, retries: 0}}}}]"]
    assert main(["train", path, *options]) == 1
    command = shlex.join(["flowgrpo", "train", path, *options, "run.resume=true"])
    assert capsys.readouterr().err.splitlines()[-1] == (
        "stopped after step 3: nothing to learn since step 1, every sample was lost; go on from step 1, the last that was "
        f"sound, with: {command}"
    )
    failed = rf"the reward 'vowels' failed \((RewardError|NoAnswer): {url}.*\); its 8 samples are dropped"
    assert re.search(failed, (folder / "log.txt").read_text())
    assert [line["reward/lost"] for line in metrics(folder)] == [0, 32, 32]
    with http_server(vowels, int(url.rpartition(":")[2])):
        assert main(["train", path, *options, "run.resume=true"]) == 0
    one, other = (weights(tmp_path / "runs" / name, 4) for name in ("whole", "served"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
