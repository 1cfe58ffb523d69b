"""Training of language models on several rewards that are put together before they are compared."""

import json
import statistics

import pytest
import runs
import torch
from in_turn import after_first_step

from flowgrpo.commands.runs import train as run
from flowgrpo.errors import InputError
from flowgrpo.mdlm import trainer

OWN = """
def early(texts, prompts):
    return [sum(c in "abcd" for c in t) / 4 for t in texts]


def late(texts, prompts):
    return [2 * sum(c in "efgh" for c in t) for t in texts]
"""


def chosen(settings, tmp_path, form, **more):
    (tmp_path / "own.py").write_text(OWN)
    uses = [{"use": f"{tmp_path / 'own.py'}:early"}, {"use": f"{tmp_path / 'own.py'}:late", "weight": 0.125}]
    return settings(rewards=uses, algorithm__preset="diffu_grpo", algorithm__baseline__combine=form, **more)


@pytest.mark.parametrize("form", ["worst", "cautious"])
def test_held_out_answers_count_by_what_their_rewards_come_to(settings, tmp_path, form):
    done = run.train_config(chosen(settings, tmp_path, form))
    manifest = [json.loads(line) for line in (done.folder / "samples" / "manifest.jsonl").read_text().splitlines()]
    assert [line["reward/count"] for line in runs.metrics(done.folder, "eval")] == [4, 4]
    for line in done.metrics:
        a, b = line["reward/early/mean"], line["reward/late/mean"] / 8
        assert line["reward/mean"] < min(a, b) + 1e-12 if form == "worst" else line["reward/mean"] < (a + b) / 2
    assert len(manifest) == 2 * settings().eval.save


def test_what_is_compared_is_the_worst_of_each_answer(settings, tmp_path, monkeypatch):
    from flowgrpo.mdlm.trainer import TextWing

    seen, real = [], TextWing.units
    monkeypatch.setattr(TextWing, "units", lambda self, batch: seen.append((batch, real(self, batch))) or seen[-1][1])
    done = run.train_config(chosen(settings, tmp_path, "worst"))
    for (batch, units), line in zip(seen, runs.metrics(done.folder), strict=True):
        expected = [min(a, b / 8) for a, b in batch.scores.values.tolist()]
        assert units.values[:, 0].tolist() == pytest.approx(expected)
        assert line["reward/mean"] == pytest.approx(statistics.mean(expected))
        assert line["reward/late/mean"] == pytest.approx(batch.scores.values[:, 1].mean().item())


def test_a_resumed_run_is_the_run_that_was_never_stopped(settings, tmp_path):
    whole = run.train_config(chosen(settings, tmp_path, "worst", run__name="whole"))
    after_first_step(whole.folder.parent, "whole", "parts")
    rest = run.train_config(chosen(settings, tmp_path, "worst", run__name="parts", run__resume=True))
    one, other = runs.weights(whole.folder, 2), runs.weights(rest.folder, 2)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_one_reward_says_which_answers_are_good_and_another_ranks_them(settings, tmp_path, monkeypatch):
    seen, real = [], trainer.update_on

    def update_on(config, policy, update_batch, batch, **options):
        seen.append((update_batch, batch.scores.values[update_batch.rows]))
        return real(config, policy, update_batch, batch, **options)

    monkeypatch.setattr(trainer, "update_on", update_on)
    (tmp_path / "own.py").write_text(OWN)
    uses = [{"use": f"{tmp_path / 'own.py'}:early"}, {"use": f"{tmp_path / 'own.py'}:late", "weight": 0}]
    words = {"rewards": uses, "algorithm__preset": "diffu_grpo", "train__iterations": 1}
    run.train_config(settings(**words, algorithm__objective={"name": "contrast", "rank_by": "late"}))
    assert len(seen) == 2
    for update_batch, values in seen:
        assert update_batch.rank.tolist() == values[:, 1].tolist()
        assert len(update_batch.rank.unique()) > 1
        for group in update_batch.group.unique():
            early, advantage = (
                values[update_batch.group == group, 0],
                update_batch.advantage[update_batch.group == group],
            )
            torch.testing.assert_close(advantage, early - early.mean())
    with pytest.raises(InputError, match="rank_by: 'latte' is not one of rewards, did you mean 'late'"):
        settings(**words, algorithm__objective={"name": "contrast", "rank_by": "latte"})
