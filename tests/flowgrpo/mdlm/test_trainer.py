"""Training of language models through the command's own door, on a tiny random one that is saved to disk."""

import json
from dataclasses import replace

import pytest
import runs
import torch
from in_turn import Turn, after_first_step, trained_in_turn
from safetensors.torch import load_file

from flowgrpo.commands.runs import train as run
from flowgrpo.errors import InputError
from flowgrpo.mdlm import trainer, update
from flowgrpo.mdlm.decoding.network import predictor
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from flowgrpo.mdlm.methods.likelihoods.likelihood import Autoregressive, OneStep, Trajectory
from flowgrpo.mdlm.methods.presets import PRESETS
from flowgrpo.training.advantages import unit_selection
from flowgrpo.training.run.stop_reasons import Finished, NothingToLearn

REPRESENTATIVE = ("diffu_grpo", "co_grpo")  # a likelihood of one step; one of the decoder's with a schedule that learns
IN_BLOCKS = ("diffu_grpo", "gdpo", "just_grpo", "trace_rl", "co_grpo")  # which `test_trainer_blocks` tries alike


@pytest.fixture
def settings(settings):
    """Of a run that evaluates and saves as little as it can, unless it is told to."""
    rare = {"eval__every": 16, "eval__prompts": 1, "eval__save": 0, "run__checkpoint__every": 16}
    rare |= {"eval__decoder": {"name": "low_confidence", "steps": 1}}
    return lambda **overrides: settings(**rare | overrides)


def lines(done, phase="train"):
    return runs.metrics(done.folder, phase)


def weights(done):
    return load_file(max((done.folder / "checkpoints").iterdir()) / "weights.safetensors")


def same(one, other, atol=0.0):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=atol)


def watch_updates(monkeypatch, watch):
    """Let a function see the configuration, the policy and the parts of each optimizer step before it."""
    real = update.update_on

    def update_on(config, policy, update_batch, batch, **options):
        watch(config, policy, update_batch)
        return real(config, policy, update_batch, batch, **options)

    monkeypatch.setattr(trainer, "update_on", update_on)


def untrained(settings):
    """The weights with which a run begins, of one that moves them by nothing to speak of."""
    still = {"train__learning_rate": 1e-12, "train__iterations": 1, "train__groups": 1, "train__updates": 1}
    return weights(run.train_config(settings(run__name="start", **still)))


@pytest.mark.parametrize(
    "preset", [pytest.param(preset, marks=() if preset in REPRESENTATIVE else pytest.mark.zoo) for preset in PRESETS]
)
def test_every_preset_learns_from_its_reward(settings, preset):
    chosen = {"train__learning_rate": 0.02} if preset == "spg" else {}
    chosen |= {"algorithm__preset": preset, "train__iterations": 16, "train__ema": None, "train__updates": 1}
    done = run.train_config(settings(**chosen))
    rewards = [line["reward/mean"] for line in lines(done)]
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 0.2
    assert all(line["policy/skipped_updates"] == 0 for line in lines(done))


@pytest.mark.parametrize(
    "preset", [pytest.param(preset, marks=pytest.mark.zoo if preset in IN_BLOCKS else ()) for preset in PRESETS]
)
def test_nothing_has_moved_before_the_first_update(settings, preset):
    for line in lines(run.train_config(settings(algorithm__preset=preset))):
        assert line["policy/max_abs_log_ratio"] < 1e-5
        assert line["cost/decoded"] == 32 + line.get("prompts/second_stage", 0)
        assert line["cost/model_evaluations"] == line["cost/rollout_evaluations"] + line["cost/update_evaluations"]


def test_the_drift_metric_sees_another_policy(settings, monkeypatch):
    real = update._estimate

    def shifted(*arguments):
        found = real(*arguments)
        return replace(found, each=found.each - 0.5)

    monkeypatch.setattr(update, "_estimate", shifted)
    first = lines(run.train_config(settings(algorithm__objective__kl__beta=0.0)))[0]
    assert first["policy/max_abs_log_ratio"] == pytest.approx(0.5, abs=1e-5)


DECODERS = [
    {"name": "low_confidence", "steps": 2},
    {"name": "left_to_right", "region": {"block_length": 2}, "eos_early_stop": True},
    {"name": "threshold", "committer": {"threshold": 0.3}, "proposal": {"temperature": 0}},
    {"name": "origin"},
]


@pytest.mark.parametrize("decoder", DECODERS)
def test_the_decoder_s_own_numbers_are_those_of_the_old_policy(settings, monkeypatch, decoder):
    """As the old policy's evaluations are, up to the cut into calls; so a single step measures its drift, for nothing."""
    found = []
    watch_updates(monkeypatch, lambda *told: found.append((told[2].old, update.log_probs(told[1], told[2], told[0]))))
    choices = {"algorithm__preset": "cj_grpo", "algorithm__decoder": decoder, "train__iterations": 1}
    choices |= {"train__updates": 1, "train__groups": 1, "train__micro_batch": 5}
    done = run.train_config(settings(run__patience=None, **choices))
    ((old, evaluated),) = found
    assert evaluated.abs().max() > 1
    torch.testing.assert_close(old, evaluated, rtol=0, atol=1e-5)
    assert lines(done)[0]["policy/max_abs_log_ratio"] == pytest.approx(float((old - evaluated).abs().max()), abs=1e-7)


@pytest.mark.parametrize("preset", ["just_grpo", "trace_rl", "diffu_grpo_fast"])
def test_fixed_views_give_every_pass_the_same_old_policy(settings, monkeypatch, preset):
    """Computing it once changes no weight."""
    choices = {"algorithm__preset": preset, "train__passes": 2, "train__iterations": 1}
    once = run.train_config(settings(run__name="once", **choices))
    for likelihood in (Autoregressive, Trajectory, OneStep):
        monkeypatch.setattr(likelihood, "fixed", False)
    always = run.train_config(settings(run__name="always", **choices))
    assert lines(once)[0]["cost/update_evaluations"] < lines(always)[0]["cost/update_evaluations"]
    same(weights(once), weights(always))


def test_two_iterations_are_one_and_a_resume_and_one(settings):
    choices = {"algorithm__preset": "co_grpo", "train__passes": 2, "run__checkpoint__every": 1}
    whole = run.train_config(settings(run__name="whole", **choices))
    after_first_step(whole.folder.parent, "whole", "parts")
    parts = run.train_config(settings(run__name="parts", run__resume="auto", **choices))
    with pytest.raises(Finished, match="with all its 2 iterations$"):
        run.train_config(settings(run__name="parts", run__resume="auto", **choices))
    assert any(name.startswith("schedule.") for name in weights(whole))
    same(weights(whole), weights(parts))


def test_the_batch_of_a_call_changes_nothing_but_rounding(settings):
    choices = {"train__iterations": 1, "train__groups": 2}
    one, other = (
        weights(run.train_config(settings(run__name=f"by{size}", train__micro_batch=size, **choices)))
        for size in (16, 3)
    )
    start = untrained(settings)
    for name in one:
        moved = (one[name] - start[name]).abs().max()
        assert (one[name] - other[name]).abs().max() <= 0.05 * moved + 1e-6


def test_a_rollout_has_batches_of_its_own(settings, monkeypatch):
    """Calls without a gradient, of rollouts and of the evaluation, have rollout_batch rows, those with one micro_batch."""
    sizes = {True: set(), False: set()}
    real = MaskPredictor.forward

    def watched(self, form, ids, mask, **wanted):
        sizes[torch.is_grad_enabled()].add(len(ids))
        return real(self, form, ids, mask, **wanted)

    choices = {"algorithm__preset": "gdpo", "train__updates": 1, "train__iterations": 1, "eval__prompts": 4}
    reference = weights(run.train_config(settings(run__name="reference", **choices)))
    monkeypatch.setattr(MaskPredictor, "forward", watched)
    own = run.train_config(settings(train__micro_batch=6, train__rollout_batch=15, **choices))
    # 32 answers of 3 views; 32 answers, 4 that are held out, and the probe of the model
    assert sizes == {True: {6}, False: {15, 2, 4, 1}}
    for name, tensor in weights(own).items():
        torch.testing.assert_close(tensor, reference[name], rtol=0.05, atol=1e-4)


@pytest.mark.parametrize("preset", ["diffu_grpo", "spg", "co_grpo"])
def test_the_weights_of_the_groups_scale_the_loss_and_are_not_divided_out(settings, monkeypatch, preset):
    """The gradient is the loss's: three times as long where every group weighs three times as much."""

    def norm(weights):
        monkeypatch.setattr(unit_selection, "robust_weights", lambda failed, robust: torch.tensor(weights))
        chosen = {"algorithm__preset": preset, "train__iterations": 1, "train__groups": 2, "train__updates": 1}
        done = run.train_config(settings(run__name=f"by{weights[0]:.0f}", **chosen))
        return lines(done)[0]["policy/grad_norm"]

    assert norm([3.0, 3.0]) == pytest.approx(3 * norm([1.0, 1.0]), rel=1e-4)


@pytest.mark.parametrize("preset", ["diffu_grpo", "gdpo"])
def test_answers_that_are_not_numbers_leave_the_update(settings, monkeypatch, tmp_path, preset):
    """A model that breaks on one prompt trains as one whose answers to that prompt have no reward."""
    choices = {"algorithm__preset": preset, "train__iterations": 1, "train__passes": 2, "train__ema": None}
    lost = run.train_config(
        settings(run__name="lost", rewards=[f"{tmp_path / 'mine.py'}:vowels_but_of_bcd"], **choices)
    )
    real, prompt = MaskPredictor.logits_and_hidden, torch.tensor([4, 5, 6])  # b, c, d

    def broken(self, ids, *arguments, **options):
        logits, hidden = real(self, ids, *arguments, **options)
        own = (ids[:, : len(prompt)] == prompt).all(1)
        return logits * torch.ones(len(ids), 1, 1).masked_fill(own[:, None, None], torch.nan), hidden

    monkeypatch.setattr(MaskPredictor, "logits_and_hidden", broken)
    broken = run.train_config(settings(run__name="broken", **choices))
    assert all(line["policy/skipped_updates"] == 0 for line in lines(broken))
    same(weights(lost), weights(broken), atol=1e-6)


def test_an_iteration_whose_rewards_are_all_lost_moves_nothing(settings, tmp_path):
    reward = {"use": f"{tmp_path / 'mine.py'}:of_nothing"}
    done = run.train_config(settings(rewards=[reward], algorithm__preset="diffu_grpo", run__patience=None))
    assert [line["cost/trained_edges"] for line in lines(done)] == [0, 0]
    same(weights(done), untrained(settings), atol=1e-8)


@pytest.mark.parametrize(
    ("reward", "why"),
    [("of_nothing", "no reward applies to any of its samples"), ("polite", "the rewards of each group are equal")],
)
def test_a_run_of_texts_without_anything_to_learn_stops(settings, tmp_path, reward, why):
    chosen = settings(rewards=[f"{tmp_path / 'mine.py'}:{reward}"], train__iterations=3, run__patience=2)
    with pytest.raises(NothingToLearn, match=f"stopped after step 2: nothing to learn since step 0, {why}$"):
        run.train_config(chosen)
    written = (chosen.run.folder / "log.txt").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in written] == [f"step {i}: nothing to learn, {why}" for i in (1, 2)]
    assert (chosen.run.folder / "checkpoints" / "step-000002").is_dir()


def test_the_answers_of_one_group_are_dealt_to_several_steps(settings, monkeypatch):
    """8 answers in 4 parts of 2, the same in each pass; every answer is in one part of a pass."""
    met = []
    watch_updates(monkeypatch, lambda config, policy, own: met.append(own.rows))
    choices = {"train__groups": 1, "train__updates": 4, "train__passes": 2, "train__split": "samples"}
    run.train_config(settings(algorithm__preset="diffu_grpo", train__iterations=1, **choices))
    assert [len(rows) for rows in met] == [2] * 8
    assert sorted(torch.cat(met[:4]).tolist()) == list(range(8)) != torch.cat(met[:4]).tolist()
    assert [rows.tolist() for rows in met[:4]] == [rows.tolist() for rows in met[4:]]
    with pytest.raises(InputError, match="train.split: an answer's tokens are updated on together, it has no edges"):
        settings(train__split="edges")


RULES_OF_ALL_TOKENS = {
    "train__learning_rate": 0.01,
    "algorithm__aggregation__shape": {"rule": "uncertain"},
    "algorithm__objective": {
        "clip_range": [0.4, 0.2],
        "balance": {"target": 1.05},
        "covariance": {"share": 0.1, "bounds": [0.0, 9.0]},
    },
}


OF_TWO = {
    "three shared groups": {"train__split": "samples", "train__groups": 3},
    "whole groups": {"algorithm__objective": {"name": "regression", "kl": {"beta": 0.1}}},
    "rules of all tokens": RULES_OF_ALL_TOKENS,
    "predictions of a group": {"algorithm__aggregation__shape": {"rule": "divergent"}},
    "predictions of the reference": {
        "algorithm__aggregation__shape": {"rule": "departed", "temperature": 1e-4},
        "train__learning_rate": 0.01,
    },
}


def test_two_processes_train_what_one_does(settings, tmp_path, tmp_path_factory):
    """The same two processes make the runs of all cases."""
    ones, turns = {}, []
    for number, (case, choices) in enumerate(OF_TWO.items()):
        choices = {"algorithm__preset": "diffu_grpo", "train__passes": 2, **choices}
        ones[case] = lines(run.train_config(settings(run__name=f"one-{number}", **choices)))
        words = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in choices.items()]
        turns.append(Turn(str(tmp_path), "run.yaml", f"two-{number}", [*words, "run.processes=2"]))
    (ends,) = trained_in_turn([turns], tmp_path_factory.mktemp("two"))
    assert ends == {turn.name: [None, None] for turn in turns}
    for (case, one), turn in zip(ones.items(), turns, strict=True):
        two = runs.metrics(tmp_path / "runs" / turn.name)
        for line, other in zip(one, two, strict=True):
            equal = ("reward/mean", "cost/model_evaluations", "cost/trained_edges", "groups/zero_std_fraction")
            assert [line[key] for key in equal] == [other[key] for key in equal], case
            for key in ("policy/grad_norm", "policy/kl", "policy/mean_abs_log_ratio"):
                assert line[key] == pytest.approx(other[key], rel=1e-3), case
        assert two[-1]["policy/kl"] > 0, case


@pytest.mark.parametrize("targets", ["auto", "all-linear"])
def test_adapters_are_trained_and_their_base_is_not(settings, targets):
    lora = {"rank": 2, "alpha": 4, "targets": targets}
    done = run.train_config(settings(model__lora=lora, algorithm__preset="gdpo", train__iterations=1))
    assert any("mlp" in name for name in weights(done)) == (targets == "all-linear")
    assert all("lora_" in name for name in weights(done))
    assert lines(done)[-1]["policy/grad_norm"] > 0


def test_prompts_of_all_lengths_are_trained_on_by_a_model_that_minds_padding(settings, monkeypatch):
    choices = {"algorithm__preset": "gdpo", "train__iterations": 1, "train__passes": 2}
    one = run.train_config(settings(run__name="one", **choices))
    real = predictor.probe
    monkeypatch.setattr(predictor, "probe", lambda model: (*real(model)[:2], None))
    other = run.train_config(settings(run__name="other", **choices))
    assert other.policy.predictor.padded_form is None
    assert [line["reward/mean"] for line in lines(one)] == [line["reward/mean"] for line in lines(other)]
    assert lines(other)[0]["policy/max_abs_log_ratio"] < 1e-5
    same(weights(one), weights(other), atol=1e-4)


@pytest.mark.parametrize(
    ("rewards", "named", "fails"),
    [(["solved"], None, True), (["polite", "solved"], "solved", True), (["polite", "solved"], "polite", False)],
)
def test_hints_replace_answers_that_fail_by_the_reward_that_is_named(settings, tmp_path, rewards, named, fails):
    """All answers have 2 for their form, as a wrong but well-formed answer has of gsm8k; that solves nothing."""
    hints = {"share": [1.0, 1.0], "stretch": 1.0, "reward": named}
    choices = {"rewards": [{"use": f"{tmp_path / 'mine.py'}:{name}"} for name in rewards], "run__patience": None}
    choices |= {"train__iterations": 1, "train__group_size": 16}
    (line,) = lines(run.train_config(settings(algorithm__preset="igpo", algorithm__hints=hints, **choices)))
    assert 0 < line["reward/hinted"] <= 32 if fails else line["reward/hinted"] == 0  # at most half of the answers
    assert line["reward/solved/mean"] * 64 < 3  # what the model did by itself


def test_group_wise_rewards_meet_one_group_at_a_time(settings, tmp_path):
    own = {"use": f"{tmp_path / 'mine.py'}:own"}
    done = run.train_config(settings(rewards=[own], train__iterations=1, run__patience=None))
    assert lines(done)[0]["reward/mean"] > 1


def test_samples_are_texts_with_their_order_of_decoding(settings):
    done = run.train_config(settings(eval__every=2, eval__prompts=2, eval__save=2, eval__decoder="low_confidence"))
    manifest = [json.loads(line) for line in (done.folder / "samples" / "manifest.jsonl").read_text().splitlines()]
    assert [(line["step"], line["prompt"], line["sampler"]) for line in manifest] == [
        (step, prompt, "decoder") for step in (0, 2) for prompt in ("ab", "bcd")
    ]
    sample = json.loads((done.folder / "samples" / manifest[0]["file"]).read_text())
    assert sorted(sample["steps"]) == [0, 1, 2, 3]
    assert "".join(sample["tokens"]).split("<end>")[0] == sample["text"]
    assert "step 1 of 4" in (done.folder / "gallery.html").read_text()


def test_python_gets_a_policy_that_answers(settings):
    done = run.train_config(settings(train__iterations=1))
    first, second = done.policy.sample(["ab", "c"], seed=3)
    assert [first, second] == done.policy.sample(["ab", "c"], seed=3)
    assert set(first + second) <= set("abcdefgh")


def test_evaluation_takes_its_own_decoder_which_may_be_a_word(settings):
    decoder = {"name": "low_confidence", "steps": 2}
    done = run.train_config(settings(eval__decoder=decoder, eval__prompts=4, train__iterations=1))
    assert lines(done, "eval")[0]["cost/model_evaluations"] == 4 * 2
    assert settings(eval__decoder="threshold") == settings(eval__decoder={"name": "threshold"})
    more = {"eval__decoder": "random", "eval__decoder__steps": 2}
    assert settings(**more) == settings(eval__decoder={"name": "random", "steps": 2})
