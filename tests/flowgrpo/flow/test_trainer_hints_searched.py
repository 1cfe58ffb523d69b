"""Hints from candidates that a run samples of failed prompts, by its own policy or by a teacher."""

import ahead
import pytest
import torch
from field import GaussianFlow, differing, lines, resumed, settings, trainer
from pair import pair

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.methods import hints
from flowgrpo.flow.model import teacher
from samplers import noise

SEARCH = {"name": "noised", "source": "search", "width": 24, "ladder": [0.0, 1.0]}
TEACHER = SEARCH | {"source": "teacher"}
WINNER = {"name": "noised", "source": "winner", "ladder": [0.0, 1.0]}
BY_SOURCE = {"winner": WINNER, "search": SEARCH, "teacher": TEACHER}
FAR = torch.tensor([1.5, 0.0])


def beyond(samples, prompts):
    """A success is seldom: about one sample of 70 of the small network."""
    return (samples[:, 0] > 1.0).float()


def run_of(folder, hints_of_run=SEARCH, *, field=None, iterations=6, **options):
    chosen = settings(
        folder,
        algorithm={"preset": "flow_grpo", "hints": hints_of_run, "objective": {"kl": {"beta": 0.0}}},
        train__iterations=iterations,
        train__learning_rate=1e-3,
        run__patience=None,
        model__teacher="shapes" if hints_of_run.get("source") == "teacher" else None,
    )
    return trainer(chosen, field=field, **{"reward": beyond, "teacher": lambda weight: weight + FAR, **options})


def searched_rows(run, monkeypatch):
    """The rows of the searches of each rollout, as a list that grows."""
    seen, real = [], run.hints._search

    def watched(rows, iteration):
        seen.append((iteration, dict(rows)))
        return real(rows, iteration)

    monkeypatch.setattr(run.hints, "_search", watched)
    return seen


def candidates_by_hand(run, iteration, group, text, width):
    """The ODE samples of the seeds that a search has, from their addresses."""
    first = noise.seed(run.config.run.seed, "search", iteration, group)
    seeds = [first, *(noise.seed(first, "candidate", index) for index in range(1, width))]
    return run.policy.generate([Row(text, seed) for seed in seeds])


def batches(run, iterations):
    """Roll out and learn, and yield each iteration's batch with the prompts that had a winner before it."""
    for iteration in range(iterations):
        before, run.done = set(run.hints.winners), iteration
        batch = run.made(iteration).batch
        yield iteration, batch, before
        run.hints.learn([batch.hinted])


@pytest.mark.parametrize("texts", [("a", "bb", "ccc", "dddd", "eeeee"), ("a", "bb", "ccc")])
def test_failed_prompts_without_a_winner_are_searched_once_an_iteration(tmp_path, monkeypatch, texts):
    """The first group of a prompt decides, so that processes need not ask each other."""
    run = run_of(tmp_path, texts=texts)
    seen, helped, spared = searched_rows(run, monkeypatch), 0, 0
    for iteration, batch, before in batches(run, 8):
        prompts, (values, members) = batch.groups.prompts, batch.outcomes
        best = {
            group: max(float(v) for v, (g, _) in zip(values[:, 0], members, strict=True) if g == group)
            for group in range(4)
        }
        failed = [group for group in range(4) if best[group] < 1]
        expected = [g for g in failed if prompts[g] not in before and prompts.index(prompts[g]) == g]
        at, rows = seen[-1]
        assert (at, sorted(rows)) == (iteration, expected)
        own = {group for group, *_ in batch.hinted.won}
        for group in expected:
            found = candidates_by_hand(run, iteration, group, texts[prompts[group]], 24)
            won = [x for x in found if x[0] > 1.0][-4:]
            states = [state[0] for g, _, state in batch.hinted.won if g == group]
            assert len(states) == len(won)
            assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(states, won, strict=True))
            steps = {node.root.step for node in batch.tree.nodes if node.root.group == group}
            assert (max(steps) > 0) == bool(won)  # the same visit has the hints
            helped += bool(won)
        assert own <= set(range(4)) - set(failed) | set(expected)
        assert batch.hinted.searched == len(expected)
        spared += len(failed) - len(expected)
    assert helped
    assert spared
    assert run.hints.winners


def test_a_search_is_in_the_counts_of_an_iteration(tmp_path):
    """4 groups of 8 take 6 steps; 24 candidates of each take as many, and none of them succeeds."""
    texts, failing = ("a", "bb", "ccc", "dddd"), lambda samples, prompts: samples[:, 0] * 0
    told = {}
    for source in ("winner", "search"):
        run = run_of(tmp_path / source, BY_SOURCE[source], reward=failing, texts=texts, iterations=2)
        run.run()
        told[source] = lines(run)
    for plain, line in zip(told["winner"], told["search"], strict=True):
        assert line["cost/rollout_evaluations"] == plain["cost/rollout_evaluations"] + 4 * 24 * 6
        assert line["cost/model_evaluations"] == plain["cost/model_evaluations"] + 4 * 24 * 6
        assert line["cost/decoded"] == plain["cost/decoded"] + 4 * 24 == 4 * 32
        assert (line["hints/searched"], line["hints/found"]) == (4, 0)
        assert "hints/searched" not in plain


def test_a_teacher_helps_prompts_that_the_run_never_wins(tmp_path):
    """The student is N(0, 0.3^2) and its teacher N(1.5, 0.3^2); only samples above 1 succeed."""
    for source, teaches in (("winner", 0), ("search", 0), ("teacher", 4)):
        run = run_of(tmp_path / source, BY_SOURCE[source], field=GaussianFlow(), iterations=1)
        run.run()
        (line,) = lines(run)
        assert line["reward/mean"] == 0
        assert line.get("hints/groups", 0) == teaches
        assert line.get("hints/found", 0) == teaches
        assert sum(map(len, run.hints.winners.values())) == 4 * teaches  # at most 4 of each prompt


def test_a_teacher_only_samples_and_the_policy_is_as_it_was(tmp_path):
    run = run_of(tmp_path, TEACHER, field=GaussianFlow())
    for iteration, batch, _ in batches(run, 1):
        assert torch.equal(run.policy.modules["field"].mean, torch.zeros(2))
        with run.weights.reference():
            found = candidates_by_hand(run, iteration, 0, "", 24)
        states = torch.stack([state[0] for group, _, state in batch.hinted.won if group == 0])
        torch.testing.assert_close(states, found[found[:, 0] > 1.0][-4:])


@pytest.mark.parametrize(
    "chosen", [SEARCH, SEARCH | {"search": "beam", "width": 6}, TEACHER], ids=["search", "beam", "teacher"]
)
def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path, chosen):
    def begun(name, **options):
        return run_of(tmp_path / name, chosen, field=GaussianFlow() if chosen is TEACHER else None, **options)

    whole = begun("a")
    whole.run()
    begun("b", iterations=2).run()
    rest = resumed(begun("b"), 2)
    assert lines(rest) == lines(whole)
    assert sum(line.get("hints/found", 0) for line in lines(whole)[2 if chosen is SEARCH else 0 :]) > 0
    assert sum(line.get("hints/groups", 0) for line in lines(whole)[2:]) > 0
    assert not differing(whole, rest)
    one, other = whole.hints.state(), rest.hints.state()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_beam_is_guided_by_the_rewards_and_remembers_its_states(tmp_path):
    """Its candidates lie further than those of stochastic steps without comparisons."""

    def distance(search):
        run = run_of(tmp_path / search, SEARCH | {"search": search, "success": -1e9, "width": 16, "winners": 16},
                     field=GaussianFlow(), reward=lambda samples, prompts: samples[:, 0])  # fmt: skip
        run.made(0)  # all groups succeed, so the next line searches though no group failed
        found, decoded = run.hints._search({0: Row("a", 0)}, 0)
        assert decoded == (64 if search == "beam" else 16)
        return float(torch.stack([state[0] for state in found[0]])[:, 0].mean())

    assert distance("beam") > distance("best-of-n") + 0.2


@pytest.mark.parametrize("processes", ["two processes", "one shard of two"])
def test_processes_remember_what_one_does(tmp_path, processes):
    first, second = pair(ahead.searching if processes == "two processes" else ahead.searching_together, tmp_path)
    alone = ahead.searched(tmp_path / "alone")
    for found in (first, second):
        assert found.keys() == alone.keys()
        assert all(torch.allclose(found[name], alone[name], atol=1e-5) for name in alone)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert len(alone["order"])


def test_what_does_not_go_with_candidates_is_refused(tmp_path):
    kl = {"beta": 0.1, "reference": "teacher"}

    def taught(**objective):
        return settings(tmp_path, algorithm={"preset": "flow_grpo", "hints": TEACHER, **objective})

    assert taught(objective={"kl": {"beta": 0.0}}).algorithm.reference == "teacher"
    assert taught(objective={"kl": kl}).algorithm.reference == "teacher"
    with pytest.raises(
        InputError, match="hints.source: a teacher takes the place of the reference, but the reference is fixed; take"
    ):
        taught(objective={"kl": {"beta": 0.1}})
    with pytest.raises(InputError, match=r"model.teacher: algorithm.hints.source=teacher needs one; name a LoRA"):
        teacher.check(taught(objective={"kl": {"beta": 0.0}}))
    with pytest.raises(InputError, match=r"model.teacher: nothing uses it; .*algorithm.hints.source=teacher, or take"):
        settings(tmp_path, model__teacher="shapes", algorithm={"preset": "flow_grpo", "hints": SEARCH})
    run = run_of(tmp_path, SEARCH | {"search": "beam"}, steps=2)
    with pytest.raises(InputError, match="beam compares candidates between stochastic steps, 2 steps have no place"):
        run.hints.prepare(Row("a", 0))
    run_of(tmp_path, SEARCH, steps=2).hints.prepare(Row("a", 0))
    assert hints.Noised().source == "winner"
