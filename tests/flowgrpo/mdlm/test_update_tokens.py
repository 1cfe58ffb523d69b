"""Optimizer steps on texts by rules that compare all of their tokens."""

import pytest
import runs

from flowgrpo.commands.runs import train as run
from flowgrpo.mdlm import update


def watched(settings, monkeypatch, rule, **overrides):
    """A run, and for each of its optimizer steps the batch and the weights of tokens that the loss gets."""
    seen, real = [], update.backward

    def backward(*arguments, **options):
        seen.append(options["token_weight"])
        return real(*arguments, **options)

    monkeypatch.setattr(update, "backward", backward)
    few = {"train__iterations": 1, "train__updates": 1, "eval__prompts": 1, "eval__save": 0}
    shape = {} if rule is None else {"algorithm__aggregation__shape": {"rule": rule}}
    chosen = settings(**{**few, **shape, **overrides})
    return run.train_config(chosen), seen


@pytest.mark.parametrize(
    ("preset", "rule"),
    [("diffu_grpo", "confident"), ("cj_grpo", "uncertain"), ("just_grpo", "largest"), ("cj_grpo", "conflict"),
     ("diffu_grpo", "pivotal"), ("cj_grpo", "divergent"), ("diffu_grpo", "divergent")],
)  # fmt: skip
def test_the_loss_gets_the_weights_of_the_rule(settings, monkeypatch, preset, rule):
    names = {name: {"algorithm__preset": preset, "run__name": name, "algorithm__aggregation__name": "token_mean"}
             for name in ("plain", "shaped")}  # fmt: skip
    _, (plain,) = watched(settings, monkeypatch, None, **names["plain"])
    monkeypatch.undo()
    done, (shaped,) = watched(settings, monkeypatch, rule, **names["shaped"])
    assert shaped.sum().item() == pytest.approx(plain.sum().item(), rel=1e-5)
    assert not shaped[plain == 0].any()
    assert (shaped - plain).abs().max() > 1e-4
    assert runs.metrics(done.folder)[0]["policy/skipped_updates"] == 0


@pytest.mark.parametrize("rule", ["uncertain", "confident", "divergent", "departed"])
def test_recorded_log_probabilities_stay_those_of_the_decoder(settings, monkeypatch, rule):
    """The pass that finds the entropies must not replace them: the first ratios are those of a run without it."""
    lines = []
    for name, chosen in (("plain", None), ("shaped", rule)):
        overrides = {"algorithm__preset": "cj_grpo", "run__name": name, "train__learning_rate": 1e-12}
        lines.append(runs.metrics(watched(settings, monkeypatch, chosen, **overrides)[0].folder)[0])
        monkeypatch.undo()
    assert lines[0]["policy/max_abs_log_ratio"] == lines[1]["policy/max_abs_log_ratio"] is not None


def test_tokens_weigh_by_how_far_they_departed_from_the_start_of_training(settings, monkeypatch):
    """Without a KL term. In the first iteration nothing has departed."""
    seen, real = [], update.shape_tokens
    monkeypatch.setattr(update, "shape_tokens", lambda shape, tokens, *rest: (
        seen.append(tokens.measure[tokens.scored]), real(shape, tokens, *rest))[1])  # fmt: skip
    few = {"algorithm__preset": "diffu_grpo", "train__learning_rate": 0.01, "train__iterations": 2}
    few |= {"algorithm__objective__kl__beta": 0.0, "algorithm__aggregation__name": "token_mean"}
    shape = {"algorithm__aggregation__shape": {"rule": "departed", "temperature": 1e-4}}
    done, weights = watched(settings, monkeypatch, None, **few, **shape)
    first, second = seen
    assert not first.any()
    assert 1e-3 < second.min() < second.max() < 1
    before, after = (each[each > 0] for each in weights)
    assert before.std() < 1e-6
    assert after.std() > 0.1 * after.mean()
    assert runs.metrics(done.folder)[-1]["policy/skipped_updates"] == 0


@pytest.mark.parametrize("rule", ["clip", "kl"])
def test_a_share_of_tokens_is_chosen_by_their_covariance(settings, monkeypatch, rule):
    seen, real = [], update.backward

    def backward(*arguments, **options):
        seen.append(options["chosen"])
        return real(*arguments, **options)

    monkeypatch.setattr(update, "backward", backward)
    bounds = {"bounds": [0.0, 9.0]} if rule == "clip" else {}
    covariance = {"rule": rule, "share": 0.1, **bounds}
    few = {"train__iterations": 1, "eval__prompts": 1, "eval__save": 0, "algorithm__preset": "cj_grpo"}
    done = run.train_config(settings(**few, algorithm__objective__covariance=covariance))
    assert [int(chosen.sum()) for chosen in seen] == [int(0.1 * chosen.numel()) for chosen in seen] != []
    line = runs.metrics(done.folder)[0]
    assert (line["policy/clip_fraction"] > 0) == (rule == "clip")


def test_a_clip_range_in_balance_moves_only_where_the_policy_has(settings, monkeypatch):
    """In the first optimizer step of an iteration all ratios are 1; a target out of reach ends at the end."""
    seen, real = [], update.backward

    def backward(*arguments, **options):
        seen.append(options["objective"].clip_range)
        return real(*arguments, **options)

    monkeypatch.setattr(update, "backward", backward)
    few = {"train__iterations": 1, "eval__prompts": 1, "eval__save": 0, "algorithm__preset": "diffu_grpo"}
    for target, name in ((1e-6, "met"), (1e6, "missed")):
        objective = {"clip_range": [0.4, 0.2], "balance": {"target": target}}
        run.train_config(settings(**few, run__name=name, algorithm__objective=objective))
    assert seen == [[0.4, 0.2]] * 2 + [[0.1, 2.0]] * 2


def test_a_balanced_step_measures_the_ratios_of_the_present_policy(settings, monkeypatch):
    seen, real = [], update.TokenRatio.balanced

    def balanced(self, log_ratio, advantage, reduce):
        seen.append((log_ratio, advantage))
        return real(self, log_ratio, advantage, reduce)

    monkeypatch.setattr(update.TokenRatio, "balanced", balanced)
    few = {"train__iterations": 1, "eval__prompts": 1, "eval__save": 0, "algorithm__preset": "diffu_grpo"}
    run.train_config(settings(**few, train__learning_rate=0.01, algorithm__objective__balance={}))
    (first, _), (second, advantage) = seen
    assert not first.any()
    assert second.abs().max() > 1e-4
    assert advantage.unique().numel() > 1
