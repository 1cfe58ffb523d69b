"""The cache of blocks: what it leaves out, that a row is on its own, that a call is, and what is refused."""

from itertools import pairwise

import pytest
import tiny
import torch

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.networks.block_cache import BlockCache
from flowgrpo.flow.pipeline.policy import DiffusersPolicy

ROWS = [Row("a red circle", 1), Row("a red circle", 2), Row("a red circle", 3)]
ALL = 1e9  # a threshold by which everything is left out
NOTHING = 1e-9


class Block(torch.nn.Module):
    """Adds what it is told to, and counts."""

    def __init__(self, add):
        super().__init__()
        self.add, self.calls = add, 0

    def forward(self, hidden_states):
        self.calls += 1
        return hidden_states + self.add(hidden_states)


class Network(torch.nn.Module):
    def __init__(self, *adds):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(add) for add in adds])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Clock:
    step = 0

    def __call__(self):
        return self.step


def cached(network, threshold):
    clock = Clock()
    return BlockCache([network], threshold, clock, "algorithm.tree.finish.cache"), clock


def test_what_the_others_added_is_added_again_where_the_first_adds_about_the_same():
    """The first block adds its input's mean, the others 7 and the square: known by hand at every step."""
    network = Network(
        lambda x: x.mean(1, keepdim=True).expand_as(x), lambda x: torch.full_like(x, 7.0), lambda x: x * x
    )
    blocks = list(network.blocks)
    cache, clock = cached(network, 0.1)
    with cache.on():
        first = network(torch.tensor([[1.0, 3.0]]))  # 2 is added: 3, 5; then 10, 12; then 110, 156
        assert first.tolist() == [[110.0, 156.0]]
        clock.step = 1
        near = network(torch.tensor([[1.1, 3.1]]))  # 2.1 is added, 5 % more: the others add 107 and 151, as before
        torch.testing.assert_close(near, torch.tensor([[1.1 + 2.1 + 107, 3.1 + 2.1 + 151]]))
        clock.step = 2
        far = network(torch.tensor([[1.3, 3.3]]))  # 2.3 is 15 % more than 2
        torch.testing.assert_close(far, torch.tensor([[10.6 + 10.6**2, 12.6 + 12.6**2]]))
        clock.step = 3
        network(torch.tensor([[1.5, 3.5]]))  # 2.5 is 9 % more than 2.3, to which it is compared from then on
    assert cache.skipped == 2
    assert [block.calls for block in blocks] == [4, 2, 2]
    assert list(network.blocks) == blocks


def test_a_row_takes_what_it_takes_alone_and_blocks_are_left_out_when_all_can_do_without():
    torch.manual_seed(0)
    steps = torch.randn(1, 4, 6).expand(5, 4, 6) + torch.linspace(0, 1, 5)[:, None, None] * torch.tensor(
        [0.01, 0.2, 1.0, 3.0]
    ).view(1, 4, 1)  # rows that change by more and more
    network = Network(torch.tanh, torch.sin, torch.cos)

    def walked(rows):
        cache, clock = cached(network, 0.1)
        found = []
        with cache.on():
            for clock.step, x in enumerate(steps[:, rows]):
                found.append(network(x))
        return torch.stack(found), cache.skipped

    together, skipped = walked([0, 1, 2, 3])
    alone = [walked([row]) for row in range(4)]
    torch.testing.assert_close(together, torch.cat([found for found, _ in alone], 1), rtol=0, atol=1e-6)
    assert alone[0][1] == 4 > alone[3][1]
    assert skipped % 4 == 0
    assert skipped <= 4 * alone[3][1]


def test_the_calls_of_one_step_are_told_apart_by_their_order():
    """Guidance with a call for each branch: each has its own first block and its own others."""
    network = Network(lambda x: torch.ones_like(x), lambda x: 2 * x)
    cache, clock = cached(network, 0.1)
    with cache.on():
        for clock.step in (0, 1):
            found = [float(network(torch.tensor([[value]]))) for value in (1.0, 10.0)]
    assert found == [6.0, 33.0]  # 1 + 1 + 4 and 10 + 1 + 22, where the other's would be 24 and 15
    assert cache.skipped == 2


def test_rows_of_another_number_or_form_compute_anew():
    network = Network(lambda x: torch.ones_like(x), lambda x: 2 * x)
    cache, clock = cached(network, ALL)
    with cache.on():
        for clock.step, rows in enumerate((1, 2, 2)):
            network(torch.ones(rows, 3))
    assert cache.skipped == 2


def pipeline(family):
    """A tiny pipeline; Flux's with three blocks of its second list."""
    pipe = getattr(tiny, family)()
    if family == "flux":
        torch.manual_seed(0)
        deeper = dict(pipe.transformer.config) | {"num_single_layers": 3}
        pipe.register_modules(transformer=type(pipe.transformer).from_config(deeper))
    return pipe


@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_a_pipeline_s_blocks_are_left_out_and_no_call_knows_of_another(family):
    policy = DiffusersPolicy(pipeline(family), tiny.CALLS[family])
    policy.check(ROWS)
    state, sigmas = policy.start(ROWS), policy.sigmas
    exact = policy.finish(state, sigmas, ROWS)
    for threshold, skipped in ((NOTHING, 0), (ALL, 3 * (len(sigmas) - 2))):
        cache = policy.cache(threshold, "train.draft.cache")
        with policy.cached(cache):
            found = policy.finish(state, sigmas, ROWS)
            assert cache.skipped == skipped
            policy.finish(tuple(x + 1 for x in state), sigmas[1:], ROWS)  # something else in between
            assert torch.equal(policy.finish(state, sigmas, ROWS)[0], found[0])
            alone = policy.finish(tuple(x[1:2] for x in state), sigmas, ROWS[1:2])
            torch.testing.assert_close(alone[0], found[0][1:2], rtol=0, atol=1e-5)
        assert torch.equal(exact[0], found[0]) == (threshold == NOTHING)
    assert torch.equal(policy.finish(state, sigmas, ROWS)[0], exact[0])


@pytest.mark.parametrize("family", ["sd3", "flux"])
@pytest.mark.parametrize("stops", [[0, 1, 2, 3, 4], [1, 2, 3, 4], [0, 2, 4], [1, 4]])
def test_several_steps_of_one_call_are_to_the_bit_those_of_a_call_each(family, stops):
    policy = DiffusersPolicy(pipeline(family), tiny.CALLS[family])
    policy.check(ROWS)
    state = policy.start(ROWS)
    sigmas = [policy.sigmas[stop] for stop in stops]
    before = policy.evaluations
    found = policy.finish(state, sigmas, ROWS)
    assert policy.evaluations - before == 3 * (len(stops) - 1)
    for sigma, following in pairwise(sigmas):
        with torch.no_grad():
            velocity = policy.velocity(state, sigma, ROWS)
        state = tuple(x + v * (following - sigma) for x, v in zip(state, velocity, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found, state, strict=True))


class Pair(torch.nn.Module):
    def forward(self, hidden_states):
        return hidden_states, hidden_states


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (lambda: torch.nn.Linear(2, 2), "Linear has no list of blocks that could be left out, take null"),
        (lambda: Network(torch.sin), "Network has no list of blocks"),
    ],
)
def test_a_network_without_blocks_is_one_sentence(network, said):
    with pytest.raises(InputError, match=rf"algorithm\.tree\.finish\.cache: {said}"):
        cached(network(), 0.1)


def test_blocks_that_return_something_else_than_they_take_are_one_sentence():
    network = Network(torch.sin, torch.cos)
    network.blocks[1] = Pair()
    cache, _ = cached(network, 0.1)
    said = r"the last block of Network returns something else than the first"
    with cache.on(), pytest.raises(InputError, match=said):
        network(torch.ones(1, 2))
    network = Network(torch.sin, torch.cos)
    network.blocks[0] = torch.nn.Linear(2, 3)
    cache, _ = cached(network, 0.1)
    with cache.on(), pytest.raises(InputError, match=r"the blocks of Network do not add to what enters them"):
        network(torch.ones(1, 2))
    assert isinstance(network.blocks[0], torch.nn.Linear)  # put back


class Folded(torch.nn.Module):
    """Returns a stream whose rows are cut in two, beside the one that entered."""

    def forward(self, hidden_states):
        return hidden_states + 1, hidden_states.reshape(2 * len(hidden_states), -1)


def test_rows_that_a_block_cuts_are_one_sentence_at_the_first_call():
    network = Network(torch.sin, torch.cos)
    network.blocks[0] = network.blocks[1] = Folded()
    cache, _ = cached(network, 0.1)
    network.forward = lambda x: network.blocks[1](network.blocks[0](x)[0])
    with cache.on(), pytest.raises(InputError, match=r"the outputs of a block have unequal numbers of rows"):
        network(torch.ones(3, 2))


class Joint(torch.nn.Module):
    """Two streams of one shape; what entered first goes on as the second output."""

    def forward(self, hidden_states):
        return hidden_states * 3, hidden_states * 1.5


def test_which_stream_goes_on_is_seen_once_for_all_rows_to_come():
    """A row that is 0 would tell nothing by itself."""
    network = Network(torch.sin, torch.cos)
    network.blocks[0] = network.blocks[1] = Joint()
    network.forward = lambda x: network.blocks[1](network.blocks[0](x)[1])
    cache, _ = cached(network, 0.1)
    (stack,) = cache._stacks
    with cache.on():
        network(torch.ones(1, 2))
        cache.reset()
        network(torch.zeros(1, 2))
    assert stack._stream == 1
