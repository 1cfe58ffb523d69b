"""How far answers agree, by hand, and what it does to the advantages of a run."""

import math

import pytest
import torch
from runs import metrics

from flowgrpo.commands.runs import train as run
from flowgrpo.errors import InputError
from flowgrpo.mdlm.rollouts.semantic_entropy import certainty, meaning, semantic_entropy
from flowgrpo.training import comparison


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (r"so it is \boxed{\frac{1}{2}}.", "<answer>0.5</answer>", True),
        ("a long way\n#### 1,000", "another\n#### 1000.0", True),
        (r"\boxed{x^2}", r"thus \boxed{ x ^ 2 }", True),
        (r"\boxed{3}", r"\boxed{-3}", False),
        ("no mark here", "no  mark here", True),
        ("no mark here", "no mark there", False),
    ],
)
def test_answers_of_one_meaning_are_spelled_alike(one, other, equal):
    assert (meaning(one) == meaning(other)) == equal


def test_the_entropy_is_that_of_the_shares():
    assert semantic_entropy(["a"] * 4) == 0
    assert semantic_entropy(["a", "a", "b", "c"]) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(4))
    assert semantic_entropy(list("abcd")) == pytest.approx(math.log(4))


def test_groups_that_agree_keep_their_advantages():
    groups, meanings = [0, 1, 2, 0, 1, 2, 0, 1, 2, 4], list("aaabababca")
    found = certainty(groups, meanings, sensitivity=0.6, groups=5)
    entropies = [semantic_entropy("aba"), semantic_entropy("aab"), semantic_entropy("abc"), 0, 0]
    assert found.tolist() == pytest.approx([1 - 0.6 * each / math.log(3) for each in entropies])
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0)).tolist()
    mixed = certainty([groups[i] for i in order], [meanings[i] for i in order], sensitivity=0.6, groups=5)
    assert torch.equal(mixed, found)
    extremes = certainty([0, 0, 1, 1], list("aaab"), sensitivity=1.0, groups=2)
    assert extremes.tolist() == [1, 0]


def test_a_run_multiplies_the_advantages_of_each_group(settings, monkeypatch):
    seen, real = {}, comparison.compare

    def watched(state, wing, units, batch):
        found = real(state, wing, units, batch)
        seen.setdefault(state.config.train.semantic_entropy, (found.advantages, batch, wing.group_factors(batch)))
        return found

    monkeypatch.setattr(comparison, "compare", watched)
    for sensitivity in (0.0, 0.5):
        name = f"of-{sensitivity}"
        done = run.train_config(settings(run__name=name, train__semantic_entropy=sensitivity, train__iterations=1))
        assert metrics(done.folder)
    (plain, batch, none), (scaled, _, factors) = seen[0.0], seen[0.5]
    assert none is None
    texts = [meaning(text) for text in batch.completions.texts]
    for group in batch.group.unique().tolist():
        own = [text for (of, _), text in zip(batch.members, texts, strict=True) if of == group]
        assert factors[group] == pytest.approx(1 - 0.5 * semantic_entropy(own) / math.log(len(own)))
    assert len(factors.unique()) > 1
    assert torch.equal(scaled, plain * factors[batch.group])
    assert not torch.equal(scaled, plain)


def test_a_sensitivity_is_a_fraction(settings):
    with pytest.raises(InputError, match=r"^train\.semantic_entropy: 1\.5 is wrong"):
        settings(train__semantic_entropy=1.5)
