"""A run whose model diverges says so and stops, and what it had learnt before is kept."""

import math

import pytest
import torch
from conftest import furnished
from field import Network, lines, settings, trainer
from runs import weights

from flowgrpo.cli import main
from flowgrpo.training.reports import learning_signal
from flowgrpo.training.run.stop_reasons import NothingToLearn
from flowgrpo.training.weights.trained_weights import Weights


class Diverging(Network):
    """From the second iteration on not a number: always, or as soon as a gradient is asked for."""

    run, always = None, False

    def forward(self, x, sigma, rows):
        velocity = super().forward(x, sigma, rows)
        if self.run is None or self.run.done < 1:
            return velocity
        return velocity * (math.nan if self.always or torch.is_grad_enabled() else 1.0)


NOT_FINITE = "no update had a finite gradient"
NOT_TRAINED = "none of its samples can be trained on"
NONE_ANY_MORE = "no held-out sample has a reward any more"


@pytest.mark.parametrize(("always", "why", "skipped"), [(False, NOT_FINITE, 2), (True, NOT_TRAINED, 0)])
def test_a_model_that_cannot_be_updated_has_nothing_to_learn_though_it_has_rewards(tmp_path, always, why, skipped):
    """Its decoder makes numbers of what are none."""
    sizes = {"train__iterations": 6, "train__groups": 4, "train__group_size": 12, "train__replay": "always"}
    kept = {"run__patience": 2, "run__checkpoint": {"every": 1, "keep": 1}, "eval__every": 1, "eval__save": 0}
    field = Diverging()
    chosen = settings(tmp_path, algorithm={"preset": "flow_grpo"}, eval__prompts=2, **sizes, **kept)
    run = trainer(chosen, field, reward=lambda samples, prompts: list(range(len(prompts))))
    field.run, field.always = run, always
    decode = run.policy.decode
    run.policy.decode = lambda *arguments: decode(*arguments).nan_to_num()
    with pytest.raises(
        NothingToLearn, match=f"^stopped after step 3: nothing to learn since step 1, {why}$"
    ) as stopped:
        run.run()
    assert (stopped.value.status, stopped.value.rest) == (1, "go on from step 1, the last that was sound,")
    dropped = ["240 steps of samples have a log-probability that is not finite and are not trained on"] * always
    heard = [line.split(" ", 2)[2] for line in (tmp_path / "r" / "log.txt").read_text().splitlines()]
    assert heard == [*dropped, f"step 2: nothing to learn, {why}", *dropped, f"step 3: nothing to learn, {why}"]
    keys = ("policy/updates", "policy/skipped_updates", "reward/lost")
    assert [[line[key] for key in keys] for line in lines(run)] == [[2, 0, 0], *[[0, skipped, 0]] * 2]
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == ["step-000001", "step-000003"]


@pytest.mark.parametrize(
    ("trained", "evaluated", "sound"),
    [
        ((0.5, 2, 1), [], True),
        ((0.5, 0, 0), [], True),  # nothing was to be learnt
        ((0.5, 2, 0), [], False),
        ((None, 0, 0), [], False),
        ((None, 0, 0), [0.5], True),  # the rewards are back
        ((0.5, 2, 1), [None], False),
        ((0.5, 2, 0), [0.5], False),
    ],
)
def test_what_was_sampled_last_says_whether_a_checkpoint_is_sound(trained, evaluated, sound):
    line = dict(zip(("reward/mean", "groups/teaching", "policy/updates"), trained, strict=True))
    assert learning_signal.is_sound([line, *({"reward/mean": mean} for mean in evaluated)]) == sound


def poisoned(monkeypatch, value, at):
    """The trained weights become a value in one update."""
    real = Weights.after_update

    def after_update(self):
        if self.updates == at - 1:
            for parameter in self.parameters:
                parameter.data.fill_(value)
        real(self)

    monkeypatch.setattr(Weights, "after_update", after_update)


LATE = ["train.iterations=4", "train.updates=1", "train.groups=1", "eval.prompts=1", "eval.save=0"]
OPTIONS = [*LATE, "run.patience=2", "run.checkpoint.keep=1"]


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    """The weights of a run that does not diverge."""
    with furnished(tmp_path_factory.mktemp("whole"), tiny_model) as folder:
        (folder / "prompts.txt").write_text("a red circle\n")
        assert main(["train", "tiny.yaml", *OPTIONS]) == 0
    return weights(folder / "runs" / "t", 4)


@pytest.mark.parametrize(
    ("value", "stopped"),
    [
        (1e30, "stopped after step 4: nothing to learn since step 2, every sample was lost"),
        (math.nan, "stopped after step 2: the trained weights are not finite"),
    ],
)
def test_the_command_stops_and_goes_on_from_before_the_model_diverged(
    workplace, whole, monkeypatch, capsys, *, value, stopped
):
    (workplace / "prompts.txt").write_text("a red circle\n")
    with monkeypatch.context() as patched:
        poisoned(patched, value, at=2)
        assert main(["train", "tiny.yaml", *OPTIONS]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    command = f"flowgrpo train tiny.yaml {' '.join(OPTIONS)} run.resume=true"
    assert said == f"{stopped}; go on from step 1, the last that was sound, with: {command}"
    run = workplace / "runs" / "t"
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    told = (run / "log.txt").read_text()
    if math.isnan(value):
        assert kept == ["step-000001"]
        assert told.endswith("step 2: the trained weights are not finite\n")
    else:
        assert kept == ["step-000001", "step-000004"]
        dropped = "4 of 4 samples are not finite and are dropped, unseen by the reward 'redness'"
        assert told.count(dropped) == 2
        assert [f"step {step}: nothing to learn, every sample was lost" in told for step in (2, 3, 4)] == [0, 1, 1]

    assert main(["train", "tiny.yaml", *OPTIONS, "run.resume=true"]) == 0
    rest = weights(run, 4)
    assert all(torch.equal(tensor, rest[name]) for name, tensor in whole.items())
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000004"]


@pytest.mark.parametrize(
    ("at", "words", "rest"),
    [
        (3, ["run.patience=9"], "go on from step 2, the last that was sound, with: {command} run.resume=true"),
        pytest.param(
            4,
            ["run.patience=null"],
            "go on from step 3, the last that was sound, with: {command} run.resume=true",
            marks=pytest.mark.zoo,
        ),
        (1, ["run.patience=9"], "no checkpoint is sound, mend that and begin again with: {command} run.name=t-2"),
    ],
)
def test_a_run_that_ends_with_weights_that_sample_nothing_does_not_end_well(
    workplace, monkeypatch, capsys, *, at, words, rest
):
    """They are numbers still, which is what a checkpoint asks for."""
    poisoned(monkeypatch, 1e30, at=at)
    options = [*LATE, *words]
    assert main(["train", "tiny.yaml", *options]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    command = f"flowgrpo train tiny.yaml {' '.join(options)}"
    assert said == f"ended after step 4: no held-out sample has a reward any more; {rest.format(command=command)}"
    assert "step-000004" in [path.name for path in (workplace / "runs" / "t" / "checkpoints").iterdir()]


def trained_line(step, mean, lost=0, updates=1):
    line = {"step": step, "phase": "train", "reward/mean": mean, "reward/lost": lost, "groups/teaching": 2}
    return line | {"policy/updates": updates, "policy/skipped_updates": 1 - updates, "policy/grad_norm": 1.0}


def evaluated_line(step, mean):
    return {"step": step, "phase": "eval", "reward/mean": mean}


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], None),
        ([evaluated_line(0, 0.5), trained_line(1, 0.5), evaluated_line(1, 0.5)], None),
        ([evaluated_line(0, 0.5), trained_line(1, None, lost=8), trained_line(2, 0.5)], None),  # they are back
        ([evaluated_line(0, 0.5), trained_line(1, None, lost=8), evaluated_line(1, 0.5)], None),
        ([evaluated_line(0, 0.5), trained_line(1, 0.5), evaluated_line(1, None)], NONE_ANY_MORE),
        ([evaluated_line(0, None), trained_line(1, 0.5), evaluated_line(1, None)], None),  # none ever had one
        ([trained_line(1, 0.5), trained_line(2, None, lost=8) | {"groups/teaching": 0}], "every sample was lost"),
        ([trained_line(1, 0.5), trained_line(2, None) | {"groups/teaching": 0}], None),  # no reward was for its prompts
        ([trained_line(1, 0.5), trained_line(2, None)], None),  # and the objective asks for none
        ([trained_line(1, 0.5), trained_line(2, 0.5, updates=0)], NOT_FINITE),
        ([trained_line(1, 0.5), trained_line(2, 0.5, updates=0) | {"policy/skipped_updates": 0}], NOT_TRAINED),
    ],
)
def test_the_end_of_a_run_tells_whether_its_weights_can_be_trusted(lines, why):
    assert learning_signal.broken(lines, 9) == why
    # Weights without an update still sample what has rewards.
    assert learning_signal.broken(lines, None) == (None if why in (NOT_FINITE, NOT_TRAINED) else why)
