"""What the estimates of a log-probability are in the mean, by enumeration of all masks."""

import math
from dataclasses import replace
from functools import partial
from itertools import combinations, permutations

import numpy as np
import pytest
import torch
from toy_predictor import MASK, PLANS, Toy, answers, copies

from flowgrpo.mdlm.methods.likelihoods import likelihood
from flowgrpo.mdlm.methods.likelihoods.all_blocks import all_blocks
from flowgrpo.mdlm.methods.likelihoods.answers import Answers
from flowgrpo.mdlm.methods.likelihoods.estimate import estimate

UNBIASED = {
    "coupled": likelihood.coupled,
    "bernoulli": likelihood.bernoulli,
    "bernoulli stratified": partial(likelihood.bernoulli, draws=4, stratified=True),
    "bernoulli antithetic": partial(likelihood.bernoulli, antithetic=True),
    "exact_k": likelihood.exact_k,
    "exact_k stratified": partial(likelihood.exact_k, draws=4, stratified=True),
    "exact_k antithetic": partial(likelihood.exact_k, antithetic=True),
    "exact_k both": partial(likelihood.exact_k, draws=4, stratified=True, antithetic=True),
    "all_blocks": partial(all_blocks, draws=4),
    "quadrature of bernoulli masks": partial(likelihood.quadrature, nodes=3, masks="bernoulli"),
}


class Enumerated:
    """All masks of the first of some answers: `sums[S]`, sum of log p over the set S of its scored tokens, S hidden."""

    def __init__(self, toy, given):
        self.places = given.scored[0].nonzero()[:, 0].tolist()
        self.length = len(self.places)
        start = given.prompt_length
        self.sums, self.each = {}, {}
        for k in range(1, self.length + 1):
            for chosen in combinations(self.places, k):
                ids = given.ids[:1].clone()
                ids[0, start:][~given.scored[0]] = MASK
                ids[0, [start + i for i in chosen]] = MASK
                with torch.no_grad():
                    table = torch.log_softmax(toy.logits(ids, given.attention_mask[:1])[0], -1)
                each = {i: table[start + i, given.ids[0, start + i]].item() for i in chosen}
                self.each[frozenset(chosen)], self.sums[frozenset(chosen)] = each, sum(each.values())

    def mean(self, k, base=None, hidden=()):
        """Mean of the sums over sets of k tokens."""
        base = self.places if base is None else base
        sets = list(combinations(base, k))
        return sum(self.each[frozenset(s) | frozenset(hidden)][i] for s in sets for i in s) / len(sets)

    @property
    def elbo(self):
        return sum(self.mean(k) / k for k in range(1, self.length + 1))


def spread(plan, given, toy, count=1500):
    """Mean of the estimate over so many addresses, and its standard error."""
    many = copies(given, count)
    found = estimate(toy, many, plan(many), 4096).seq
    return found.mean().item(), found.std().item() / math.sqrt(count)


IN_BOTH = ("coupled", "exact_k both")  # scopes in a plain run: of five tokens, and of six
SCOPES = [
    pytest.param(name, scope, marks=() if scope == "eos" or name in IN_BOTH else pytest.mark.zoo)
    for name in UNBIASED
    for scope in ("eos", "canvas")
]


@pytest.mark.parametrize(("name", "scope"), SCOPES)
def test_the_mean_is_the_elbo_of_all_masks(name, scope):
    toy, given = Toy(), answers(scope=scope)
    exact = Enumerated(toy, given)
    assert exact.length == (5 if scope == "eos" else 6)
    mean, error = spread(UNBIASED[name], given, toy)
    assert abs(mean - exact.elbo) < 4 * error
    assert error < 0.05 * abs(exact.elbo)


@pytest.mark.parametrize("draws", [1, 2, 3, 6])
def test_stratified_exact_k_is_the_estimator_of_vrpo(draws):
    """Six tokens, which the draws divide: round(k + j 6 / draws) hidden tokens, one mask each, weight 6 / count."""
    many = copies(answers(scope="canvas"), 200)
    views = likelihood.exact_k(many, draws, stratified=True)
    counts = views.scored.sum(2)  # (draws, rows)
    released = [(np.round(counts[0].numpy() + j * 6 / draws) - 1) % 6 + 1 for j in range(draws)]
    assert counts.tolist() == np.stack(released).tolist()
    assert set(counts[0].tolist()) == {1, 2, 3, 4, 5, 6}
    torch.testing.assert_close(views.weight, views.scored * 6 / (counts * draws)[:, :, None])
    again = likelihood.exact_k(many, draws, stratified=True)  # for the reference, which shares the masks
    assert torch.equal(again.hidden, views.hidden)


def test_the_elbo_is_the_mean_of_all_orders():
    """Of which `autoregressive` and `trajectory` are some."""
    toy, given = Toy(), answers(scope="canvas", length=4, end=3)
    steps = torch.tensor(list(permutations(range(4))))
    many = replace(copies(given, len(steps)), steps=steps)
    found = estimate(toy, many, likelihood.trajectory(many), 8).seq
    assert found.mean().item() == pytest.approx(Enumerated(toy, given).elbo, abs=1e-6)
    (first,) = estimate(toy, given, likelihood.autoregressive(given), 8).seq
    assert first.item() == pytest.approx(found[0].item(), abs=1e-6)
    assert found.std() > 0.01


def test_the_mean_of_quadrature_is_that_of_its_counts():
    """Three nodes of six tokens hide 1, 3 and 5; two nodes 1 and 4."""
    toy, given = Toy(), answers(scope="canvas")
    exact = Enumerated(toy, given)
    for nodes, counts in ((2, {1: 1 / 2, 4: 1 / 2}), (3, {1: 5 / 18, 3: 8 / 18, 5: 5 / 18})):
        expected = sum(share * 6 / k * exact.mean(k) for k, share in counts.items())
        mean, error = spread(partial(likelihood.quadrature, nodes=nodes), given, toy)
        assert abs(mean - expected) < 4 * error
        assert mean == pytest.approx(exact.elbo, rel=0.02)


def test_the_mean_of_centred_quadrature_is_between_counts():
    """Three nodes of six tokens are at 0.676, 3 and 5.324: with a half more, between the counts 1, 2; 3, 4; 5, 6."""
    toy, given = Toy(), answers(scope="canvas")
    exact = Enumerated(toy, given)
    term = [6 / k * exact.mean(k) for k in range(1, 7)]
    expected = 0.0
    for share, place in ((5 / 18, 1.1762), (8 / 18, 3.5), (5 / 18, 5.8238)):
        k = int(place)
        expected += share * ((k + 1 - place) * term[k - 1] + (place - k) * term[k])
    mean, error = spread(partial(likelihood.quadrature, masks="centred"), given, toy)
    assert abs(mean - expected) < 4 * error
    assert expected == pytest.approx(exact.elbo, rel=1e-3)


class Pairs(Toy):
    """Where token i + 3 is seen, token i is certain, and the other way round; digits are even otherwise."""

    def logits(self, ids, attention_mask, start=0):
        table = torch.zeros(*ids.shape, 7, dtype=torch.float64)
        table[..., MASK] = -torch.inf
        first, second = ids[:, 1:4], ids[:, 4:7]
        for at, other in ((1, second), (4, first)):
            certain = torch.nn.functional.one_hot(other, 7)[..., :6].double() * 60
            table[:, at : at + 3, :6] = certain.where((other != MASK)[..., None], 0.0)
        return table[:, start:]


def test_centred_quadrature_is_exact_where_tokens_tell_each_other():
    """The sum over k hidden tokens is then -log 6 k (k - 1) / 5, and the ELBO -3 log 6."""
    ids = torch.tensor([[0, 1, 2, 3, 1, 2, 3]])
    full = torch.ones_like(ids, dtype=torch.bool)
    given = Answers(ids=ids, attention_mask=full, scored=full[:, 1:], addresses=[("pairs",)])
    assert Enumerated(Pairs(), given).elbo == pytest.approx(-3 * math.log(6))
    for nodes in (2, 3):
        mean, error = spread(partial(likelihood.quadrature, nodes=nodes, masks="centred"), given, Pairs())
        assert abs(mean + 3 * math.log(6)) < 4 * error
    floor, error = spread(partial(likelihood.quadrature, nodes=2), given, Pairs())
    counts = sum(1 / 2 * 6 / k * -math.log(6) * k * (k - 1) / 5 for k in (1, 4))
    assert abs(floor - counts) < 4 * error
    assert floor > -3 * math.log(6) * 0.7


def test_the_mean_of_coupled_weights_as_released():
    toy, given = Toy(), answers(scope="canvas")
    exact = Enumerated(toy, given)
    rates = 0.2 + 0.6 * (np.arange(400) + 0.5) / 400
    chance = [[math.comb(6, k) * r ** (k - 1) * (1 - r) ** (6 - k) for r in rates] for k in range(7)]
    expected = exact.mean(6) / 2 + sum(np.mean(chance[k]) * exact.mean(k) for k in range(1, 7))
    mean, error = spread(likelihood.coupled_as_released, given, toy)
    assert abs(mean - expected) < 4 * error
    assert expected < 1.4 * exact.elbo < 0  # 1.5 times what it should be, but for the context


def laid(places, size):
    """The blocks of some places."""
    return [[i for i in places if i // size == block] for block in sorted({i // size for i in places})]


def block_views(places, size, rate):
    """SPG's law, enumerated: each set of hidden places of a view, and its probability."""
    parts = laid(places, size)
    for part in parts:
        before, behind = [i for i in places if i < part[0]], [i for i in places if i > part[-1]]
        for k in range(1, len(part) + 1):
            for chosen in combinations(part, k):
                for few in range(len(before) + 1):
                    for perturbed in combinations(before, few):
                        chance = rate**few * (1 - rate) ** (len(before) - few)
                        one = 1 / (len(parts) * len(part) * math.comb(len(part), k))
                        yield frozenset((*perturbed, *chosen, *behind)), chance * one


@pytest.mark.parametrize("rate", [0.0, 0.4])
@pytest.mark.parametrize("scope", ["eos", "canvas"])  # five tokens, blocks of 2, 2 and 1; or six
def test_the_mean_of_blocks_is_that_of_their_law(scope, rate):
    toy, given = Toy(), answers(scope=scope, prompt=0)
    exact = Enumerated(toy, given)
    law = list(block_views(exact.places, 2, rate))
    assert sum(chance for _, chance in law) == pytest.approx(1)
    expected = sum(chance * exact.sums[hidden] / len(hidden) for hidden, chance in law) * exact.length
    mean, error = spread(partial(likelihood.blocks, size=2, draws=2, prompt_rate=rate), given, toy)
    assert abs(mean - expected) < 4 * error
    assert abs(expected - exact.elbo) > 4 * error


# of the released forward process, 3,000 answers at seed 0: share of an answer's tokens that a view scores, standard error
RELEASED = [
    ((256, 32, 256, 2, 0.15), 0.5665, 0.0032),
    ((6, 2, 5, 3, 0.15), 0.5948, 0.0028),
    ((6, 2, 6, 3, 0.3), 0.6827, 0.0025),
]


@pytest.mark.parametrize(("numbers", "released", "error"), RELEASED)
def test_blocks_score_the_released_share_of_an_answer(numbers, released, error):
    canvas, size, length, draws, rate = numbers
    parts = laid(range(length), size)
    expected = 0.0
    for number, part in enumerate(parts):
        expected += rate * size * number + (len(part) + 1) / 2 + sum(map(len, parts[number + 1 :]))
    expected /= len(parts) * length
    assert abs(released - expected) < 4 * error
    if length == 256:
        assert expected == pytest.approx(0.5676, abs=1e-4)
    many = copies(answers(length=canvas, end=length - 1 if length < canvas else canvas), 600)
    found = likelihood.blocks(many, size, draws, rate).scored.sum(2).double().mean(0) / length  # (600,)
    assert abs(found.mean().item() - expected) < 4 * found.std().item() / math.sqrt(600)


@pytest.mark.parametrize("name", [*UNBIASED, "coupled_as_released"])
def test_each_token_weighs_one_in_the_mean_or_half_as_much_again_as_released(name):
    many = copies(answers(), 1500)
    total = {**PLANS, **UNBIASED}[name](many).weight.sum(0).double()
    error = total.std(0) / math.sqrt(1500)
    expected = many.scored[0] * (1.5 if name == "coupled_as_released" else 1.0)
    assert ((total.mean(0) - expected).abs() <= 4 * error).all()


@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
def test_quadrature_is_exact_for_polynomials_of_its_degree(nodes):
    times, shares = likelihood.gauss_legendre(nodes)
    for degree in range(2 * nodes):
        found = sum(share * t**degree for t, share in zip(times, shares, strict=True))
        assert found == pytest.approx(1 / (degree + 1), abs=1e-14)
    beyond = sum(share * t ** (2 * nodes) for t, share in zip(times, shares, strict=True))
    assert abs(beyond - 1 / (2 * nodes + 1)) > 1e-7


def test_one_step_hides_the_answer_and_some_of_the_prompt():
    given = answers(rows=400)
    chosen = likelihood.one_step(given, 0.15)
    prompt = chosen.hidden[0, :, : given.prompt_length]
    assert chosen.hidden[0, :, given.prompt_length :].all()
    assert not prompt[~given.attention_mask[:, : given.prompt_length]].any()
    rate = prompt[given.attention_mask[:, : given.prompt_length]].double().mean().item()
    assert abs(rate - 0.15) < 4 * math.sqrt(0.15 * 0.85 / 1400)
    assert torch.equal(chosen.weight[0], given.scored.float())
    toy, clean = Toy(), likelihood.one_step(given, 0.0)
    one = estimate(toy, answers(), likelihood.one_step(answers(), 0.0), 4).seq.item()
    assert one == pytest.approx(Enumerated(toy, answers()).sums[frozenset(range(5))], abs=1e-6)
    assert not clean.hidden[:, :, : given.prompt_length].any()


def test_autoregressive_is_the_chain_rule():
    toy, given = Toy(), answers()
    total = 0.0
    for i in range(5):  # up to and with the EOS
        ids = given.ids.clone()
        ids[0, 3 + i :] = MASK
        with torch.no_grad():
            total += torch.log_softmax(toy.logits(ids, given.attention_mask)[0, 3 + i], -1)[given.ids[0, 3 + i]].item()
    chosen = likelihood.autoregressive(given)
    assert len(chosen.weight) == 5
    toy.evaluations = 0
    assert estimate(toy, given, chosen, 2).seq.item() == pytest.approx(total, abs=1e-12)
    assert toy.evaluations == 5


def test_answers_of_one_token():
    toy, given = Toy(), answers(rows=4, end=0)
    given = replace(given, scored=torch.arange(6).expand(4, 6) == 0)
    for name in ("coupled", "exact_k", "quadrature", "one_step"):
        found = estimate(toy, given, PLANS[name](given), 64)
        assert (found.seq < 0).all()
        torch.testing.assert_close(found.token[:, 0], found.seq)
    everything = estimate(toy, given, likelihood.autoregressive(given), 64).seq
    torch.testing.assert_close(estimate(toy, given, likelihood.coupled(given), 64).seq, everything)


@pytest.mark.parametrize(("shrink", "count"), [(1, 6), (2, 3), (3, 2), (4, 2), (9, 1)])
def test_so_many_steps_of_a_trajectory_are_one_view(shrink, count):
    given = replace(answers(scope="canvas"), steps=torch.tensor([[5, 3, 0, 1, 4, 2]]))
    views = likelihood.trajectory(given, shrink)
    assert len(views.weight) == count
    for number, (hidden, scored) in enumerate(zip(views.hidden[:, 0, -6:], views.scored[:, 0], strict=True)):
        assert torch.equal(hidden, given.steps[0] >= number * shrink)
        assert torch.equal(scored, hidden & (given.steps[0] < (number + 1) * shrink))


def test_a_token_that_was_given_has_no_view_of_its_own_from_left_to_right():
    given = answers(scope="canvas")
    steps, scored = torch.tensor([[-1, 0, 1, -1, 2, 3]]), given.scored.clone()
    scored[0, [0, 3]] = False
    assert len(likelihood.autoregressive(replace(given, steps=steps, scored=scored)).weight) == 4
