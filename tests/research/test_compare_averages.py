"""How far averages lag the weights: their rule, and what is told of it."""

import pytest
from field import settings, trainer


@pytest.fixture
def compare(script):
    return script("compare_averages")


@pytest.mark.parametrize("every", [1, 2])
def test_the_average_of_the_run_s_own_warm_up_is_the_run_s_own(compare, tmp_path, capsys, every):
    ema = {"warmup": 5.0, "every": every}
    chosen = settings(tmp_path, train__iterations=4, eval__every=2, train__ema=ema)
    run = trainer(chosen, held_out=2)
    found = compare.measured(run, [2.0, 5.0])
    assert list(found) == [2, 4]
    assert capsys.readouterr().out.count("|") == 2 * 5
    with run.weights.averaged():
        averaged = [sample.rewards["closeness"] for sample in run.eval_samples()]
    raw = [sample.rewards["closeness"] for sample in run.eval_samples()]
    reward, lags = found[4]
    assert reward == pytest.approx(sum(raw) / len(raw))
    assert lags[5.0] == pytest.approx(compare.difference(raw, averaged))
    assert lags[2.0][0] > lags[5.0][0] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.iteration=3"], "train.iteration: unknown key, did you mean 'iterations'?"),
        (["train.ema=null"], "train.ema: is null, so that there is no average"),
        (["--prompts", "1"], "2 prompts or more"),
    ],
)
def test_what_has_no_difference_is_refused(compare, capsys, words, said):
    with pytest.raises(SystemExit) as ended:
        compare.main(["configs/shapes.yaml", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_differences_are_of_pairs(compare):
    assert compare.difference([float("nan"), 1.0, 2.0], [0.0, 1.0, 2.0]) == pytest.approx((0.0, 0.0))
    assert compare.difference([1.0, 2.0, 3.0], [0.0, 2.0, 4.0]) == pytest.approx((0.0, 1 / 3**0.5))
    found = compare.pooled([{10.0: (0.1, 0.3)}, {10.0: (0.3, 0.4)}])
    assert found[10.0] == pytest.approx((0.2, 0.25))
