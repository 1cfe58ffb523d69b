"""Search at sampling time, against plain samples and against a Gaussian flow in closed form."""

import math
from itertools import pairwise

import gaussian_flow
import pytest
import torch

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.velocity_field import FieldPolicy
from flowgrpo.flow.rollouts.rollout import walk
from flowgrpo.flow.rollouts.search import Searcher, compared_steps, effective_number, keep_best, resample
from flowgrpo.training.reports.samples import SearchUse
from rewards import Reward
from samplers.kernels import Kernel
from samplers.plans import chain
from samplers.trees import Root

SIGMAS = gaussian_flow.schedule()
STEPS = len(SIGMAS) - 1
LEVEL = 0.7
MEAN, VARIANCE = gaussian_flow.moments(
    [
        gaussian_flow.step("flow_sde", LEVEL * (i < STEPS - 1), *pair, SIGMAS[1])
        for i, pair in enumerate(pairwise(SIGMAS))
    ]
)
SEARCHES = {
    "best-of-n": {},
    "beam": {"level": LEVEL, "compare_at": (0.2, 0.5, 0.8)},
    "smc": {"level": LEVEL, "compare_at": (0.2, 0.5, 0.8), "temperature": 0.2},
}


class Exact(torch.nn.Module):
    """The exact velocity of Gaussian data, for each number of a state; it counts the states that it gets."""

    def __init__(self):
        super().__init__()
        self.none = torch.nn.Parameter(torch.zeros(1))
        self.seen = 0

    def forward(self, x, sigma, rows):
        self.seen += len(rows)
        slope, shift = gaussian_flow.velocity(float(sigma[0]))
        return slope * x + shift


def first(samples, prompts):
    """The first number of each sample."""
    return samples[:, 0].tolist()


def searcher(name, width, reward=first, *, size=1, batch_size=64, **options):
    policy = FieldPolicy(Exact(), (size,), SIGMAS)
    use = SearchUse(name=name, width=width, rewards=(), **{**SEARCHES[name], **options})
    return Searcher(policy, use, [Reward("r", reward)], batch_size), policy


def rows(count, start=0):
    return [Row("", start + i) for i in range(count)]


@pytest.mark.parametrize("name", SEARCHES)
def test_one_candidate_is_the_plain_sample_to_the_bit(name):
    search, policy = searcher(name, 1, size=3)
    found = torch.stack([sample.decoded for sample in search.search(rows(4))])
    if name == "best-of-n":
        plain = policy.generate(rows(4))
    else:
        plan = chain([Kernel("flow_sde", LEVEL)] * STEPS, range(STEPS - 1), ())
        trees = [walk(policy, plan, [Root(0, 0, row)], micro_batch=1, seed=row.seed, iteration=0) for row in rows(4)]
        plain = torch.cat([tree.samples[0] for tree in trees])
    assert torch.equal(found, plain)


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_by_steps_knows_its_final_states(name):
    search, policy = searcher(name, 5, size=2)
    for found in search.candidates(rows(3)):
        assert (found.states is None) == (name == "best-of-n")
        if found.states is not None:
            assert torch.equal(policy.decode(found.states, found.rows), found.samples)


def test_a_beam_without_noise_and_comparisons_has_the_plain_samples_of_its_seeds():
    search, _ = searcher("beam", 5, size=2, level=0.0, compare_at=())
    for row, found in zip(rows(3), search.candidates(rows(3)), strict=True):
        (plain,) = searcher("best-of-n", 5, size=2)[0].candidates([row])
        assert found.rows == plain.rows
        torch.testing.assert_close(found.samples, plain.samples, rtol=0, atol=1e-6)


def test_best_of_n_is_the_best_of_the_plain_samples_of_its_seeds():
    search, policy = searcher("best-of-n", 5)
    for row, found in zip(rows(6), search.search(rows(6)), strict=True):
        (candidates,) = search.candidates([row])
        plain = {each.seed: float(policy.generate([each])) for each in candidates.rows}
        assert len(plain) == 5
        assert row.seed in plain
        assert found.rewards == {"r": max(plain.values())}
        assert plain[found.row.seed] == max(plain.values()) == float(found.decoded)


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_depends_on_neither_batches_nor_other_rows(name):
    expected = [sample for row in rows(5) for sample in searcher(name, 6, size=2)[0].search([row])]
    for batch_size in (1, 4, 64):
        found = searcher(name, 6, size=2, batch_size=batch_size)[0].search(rows(5))
        assert [(each.row, each.rewards) for each in found] == [(each.row, each.rewards) for each in expected]
        assert all(torch.equal(a.decoded, b.decoded) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("name", "decodes"), [("best-of-n", 1), ("beam", 4), ("smc", 4)])
def test_a_search_costs_what_it_says(name, decodes):
    scored = []

    def counting(samples, prompts):
        scored.extend(prompts)
        return first(samples, prompts)

    search, policy = searcher(name, 6, counting)
    decoded, decode = [], policy.decode
    policy.decode = lambda state, rows: decoded.extend(rows) or decode(state, rows)
    search.search(rows(3))
    search.search(rows(2))
    seen = policy.modules["field"].seen
    assert seen == 5 * 6 * STEPS
    assert search.cost == {"model_evaluations": seen, "decoded": len(decoded), "reward_calls": len(scored)}
    assert len(decoded) == len(scored) == 5 * 6 * decodes
    before = policy.modules["field"].seen
    policy.generate(rows(5))
    plain = policy.modules["field"].seen - before
    assert search.plain_cost == {"model_evaluations": plain, "decoded": 5, "reward_calls": 0}


def linear(scale):
    """Mean of exp(scale x) for the sampler's law, and the mean of x under that law times exp(scale x)."""
    return math.exp(scale * MEAN + scale**2 * VARIANCE / 2), MEAN + scale * VARIANCE


def quadratic(scale):
    """The same for -(x - 2)^2 in place of x."""
    narrowed = 1 + 2 * scale * VARIANCE
    constant = math.exp(-scale * (MEAN - 2) ** 2 / narrowed) / math.sqrt(narrowed)
    return constant, (MEAN + 4 * scale * VARIANCE) / narrowed


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize(
    ("reward", "exact", "scale"),
    [(first, linear, 4.0), (lambda samples, prompts: (-((samples[:, 0] - 2) ** 2)).tolist(), quadratic, 2.0)],
    ids=["linear", "quadratic"],
)
def test_smc_has_an_unbiased_constant_and_the_tilted_mean(reward, exact, scale, width):
    search, _ = searcher("smc", width, reward, temperature=1 / scale)
    found = [each for start in range(0, 450, 150) for each in search.candidates(rows(150, start))]
    constants = torch.tensor([each.log_constant for each in found], dtype=torch.float64).exp()
    means = torch.stack([each.log_weights.softmax(0) @ each.samples[:, 0].double() for each in found])
    assert sum(len(set(each.rows)) < width for each in found) > 100  # were resampled
    constant, tilted = exact(scale)
    assert abs(float(constants.mean()) - constant) < 3 * float(constants.std()) / math.sqrt(len(found))
    estimate = float((constants * means).mean() / constants.mean())
    error = float((constants * (means - estimate)).std() / constants.mean()) / math.sqrt(len(found))
    assert abs(estimate - tilted) < 3 * error
    assert abs(MEAN - tilted) > 10 * error


def test_smc_chooses_by_the_weights():
    def share_of_first(temperature):
        search, _ = searcher("smc", 4, temperature=temperature)
        return sum(sample.row == row for row, sample in zip(rows(400), search.search(rows(400)), strict=True)) / 400

    assert abs(share_of_first(1e6) - 0.25) < 3 * math.sqrt(0.25 * 0.75 / 400)
    cold, _ = searcher("smc", 4, temperature=1e-6)
    for found, chosen in zip(cold.candidates(rows(20)), cold.search(rows(20)), strict=True):
        assert chosen.rewards == {"r": float(found.totals.max())}


def test_resampling_gives_each_candidate_its_share():
    weights = torch.tensor([0.05, 0.5, 0.0, 0.3, 0.15], dtype=torch.float64)
    grid = [(i + 0.5) / 1000 for i in range(1000)]
    counts = torch.stack([torch.tensor(resample(weights.log() + 7, u)).bincount(minlength=5) for u in grid]).double()
    assert counts.mean(0).tolist() == pytest.approx((5 * weights).tolist(), abs=2e-3)
    assert ((counts - 5 * weights).abs() < 1).all()
    assert resample(torch.zeros(4), 0.0) == resample(torch.zeros(4), 0.999) == [0, 1, 2, 3]


def test_the_effective_number_of_candidates():
    assert effective_number(torch.full((6,), 300.0).double()) == pytest.approx(6)
    assert effective_number(torch.tensor([0.0, -math.inf, -900.0])) == pytest.approx(1)
    assert effective_number(torch.tensor([3.0, 1.0]).log()) == pytest.approx(16 / 10)


def test_a_beam_keeps_the_best_and_the_first_of_equals():
    assert keep_best(torch.tensor([1.0, 3.0, math.nan, 2.0]), 2) == [1, 1, 3, 3]
    assert keep_best(torch.tensor([1.0, 2.0, 2.0, 2.0]), 1) == [1, 1, 1, 1]
    assert keep_best(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), 2) == [3, 3, 4, 4, 4]
    assert keep_best(torch.tensor([math.nan, math.nan]), 2) == [0, 1]


def test_a_beam_ends_below_its_kept_states_and_chooses_the_best():
    search, _ = searcher("beam", 6, keep=2)
    for found, chosen in zip(search.candidates(rows(8)), search.search(rows(8)), strict=True):
        assert len(set(found.rows)) <= 2
        assert len(set(found.samples[:, 0].tolist())) == 6
        assert chosen.rewards == {"r": float(found.totals.max())}


@pytest.mark.parametrize("name", SEARCHES)
def test_a_sample_of_unknown_reward_is_chosen_only_where_none_is_known(name):
    def some(samples, prompts):
        return [None if x > 0.7 else x for x in first(samples, prompts)]

    found = searcher(name, 6, some)[0].search(rows(20))
    assert all(sample.rewards["r"] == float(sample.decoded) for sample in found)
    found = searcher(name, 2, lambda samples, prompts: [None] * len(samples))[0].search(rows(3))
    assert [sample.rewards for sample in found] == [{"r": None}] * 3


def test_an_unknown_estimate_counts_as_the_mean_of_the_known_ones_and_later_as_the_last(monkeypatch):
    """The weights after two comparisons and the end, by hand; with so much temperature none is resampled."""
    seen = iter([[1.0, math.nan, 4.0], [math.nan, 2.0, 3.0], [math.nan] * 3])
    search, _ = searcher("smc", 3, temperature=10.0, compare_at=(0.2, 0.5))
    monkeypatch.setattr(search, "_score", lambda parts, _: (list(parts), torch.tensor([next(seen)]).double()))
    (found,) = search.candidates(rows(1))
    assert found.log_weights.tolist() == pytest.approx([0.1, 0.2, 0.3])  # of 1, 2 and 3: the mean 2.5 has gone again
    seen = iter([[1.0, math.nan, 4.0], [math.nan] * 3, [math.nan] * 3])
    (found,) = search.candidates(rows(1))
    assert found.log_weights.tolist() == pytest.approx([0.1, 0.25, 0.4])
    seen = iter([[math.nan] * 3, [1.0, math.nan, 4.0], [math.nan] * 3])
    (found,) = search.candidates(rows(1))
    assert found.log_weights.tolist() == pytest.approx([0.1, 0.25, 0.4])


def test_several_rewards_are_summed_by_their_weights():
    policy = FieldPolicy(Exact(), (2,), SIGMAS)
    second = Reward("second", lambda samples, prompts: samples[:, 1].tolist(), weight=-3.0)
    use = SearchUse(name="best-of-n", width=8, rewards=())
    search = Searcher(policy, use, [Reward("r", first), second], 8)
    (found,), (chosen,) = search.candidates(rows(1)), search.search(rows(1))
    totals = (found.samples[:, 0] - 3 * found.samples[:, 1]).tolist()
    best = found.samples[totals.index(max(totals))].tolist()
    assert chosen.decoded.tolist() == best == list(chosen.rewards.values())


def test_candidates_are_compared_where_noise_still_follows():
    use = SearchUse(name="smc", width=2, rewards=(), compare_at=(0.01, 0.25, 0.5, 0.99))
    assert compared_steps(use, 20) == {1, 5, 10, 18}
    assert compared_steps(use, 3) == {1}
    with pytest.raises(InputError, match="2 steps have no place for it; take 3 or more, or best-of-n"):
        compared_steps(use, 2)
    assert compared_steps(SearchUse(name="beam", width=2, rewards=()), 2) == set()
