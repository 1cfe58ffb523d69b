"""Solutions that an objective learns from, looked at before a run."""

import pytest

from flowgrpo.errors import InputError
from flowgrpo.mdlm.methods.solutions import check_every_solution


@pytest.mark.parametrize(
    ("row", "others"), [({"proof": 3, "level": 1}, "proof, level"), ({"answer": "a"}, "answer"), ({}, "no columns")]
)
def test_every_training_prompt_needs_a_solution(row, others):
    check_every_solution(None, [row])
    check_every_solution("proof", [{"proof": "a"}, {"proof": ""}])
    with pytest.raises(InputError, match=f"training prompt 2 has no text in 'proof', it has {others}"):
        check_every_solution("proof", [{"proof": "a"}, row])
