import pytest
import torch

from flowgrpo.errors import InputError
from flowgrpo.mdlm.methods.hints import hints

MASK = 999
REASONING = torch.arange(40)


def test_hints_are_chunks_at_stretched_places_and_leave_room():
    seen = []
    for i in range(50):
        fixed = hints(REASONING, 80, MASK, ("hints", i), tail=20)
        assert torch.equal(fixed, hints(REASONING, 80, MASK, ("hints", i), tail=20))
        at = (fixed != MASK).nonzero()[:, 0]
        tokens = fixed[at]
        assert (at < 60).all()
        assert ((at >= tokens) & (at <= 1.5 * tokens)).all()  # (80 - 20) / 40 is 1.5
        assert len(tokens.unique()) == len(tokens)
        assert 39 not in tokens  # the last chunk is never told
        runs = torch.tensor_split(tokens, ((at.diff() > 1) | (tokens.diff() > 1)).nonzero()[:, 0] + 1)
        assert all(len(run) >= 5 and torch.equal(run, run[0] + torch.arange(len(run))) for run in runs if len(run))
        seen.append(len(tokens) / 40)
    assert 0.2 < sum(seen) / len(seen) < 0.45


def test_a_short_solution_gives_nothing_away_and_a_long_one_is_not_stretched():
    assert (hints(REASONING[:5], 40, MASK, 0) == MASK).all()
    assert (hints(REASONING[:0], 40, MASK, 0) == MASK).all()
    fixed = hints(torch.arange(200), 100, MASK, 1)
    told = fixed != MASK
    assert told.any()
    assert torch.equal(fixed[told], told.nonzero()[:, 0])
    assert not told[70:].any()


def test_a_tail_as_long_as_the_completion_is_refused():
    with pytest.raises(InputError, match="between 0 and the length 20"):
        hints(REASONING, 20, MASK, 0)
