"""The benchmark of texts, on a small random model: what it counts, and that the bare model does what ours did."""

import json
from functools import partial

import pytest
import torch

SMALL = {"layers": 2, "width": 32, "vocabulary": 40, "rows": 2, "length": 8, "steps": 8}  # 4 blocks of 2


@pytest.fixture
def bench(script):
    return script("bench_text")


@pytest.mark.parametrize("decoder", ["low_confidence", "in blocks, prefix cache", "in blocks, dual cache"])
@pytest.mark.parametrize("whole", [False, True])
def test_the_bare_model_makes_the_same_calls(bench, decoder, whole):
    """From the same keys and values, which no call before it has changed: twice the same hidden states."""
    size = bench.large(**SMALL)
    states = []
    size.predictor.model.model.register_forward_hook(lambda _, __, out: states.append(out.last_hidden_state))
    with bench.recorded(size.predictor) as calls:
        bench.completed(size, bench.decoders(size)[decoder])
    for _ in range(2):
        bench.bare(size.predictor, calls, whole=whole)()
    assert len(states) == 3 * len(calls) == 24
    for ours, *again in zip(*(states[i : i + 8] for i in (0, 8, 16)), strict=True):
        assert all(torch.equal(ours, each) for each in again)


def test_a_run_tells_every_ratio(bench, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "SIZES", {"small": partial(bench.large, **SMALL)})
    bench.main(["--rounds", "2", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    ratios = found["ratios"]
    assert all(set(each) == {"median", "low", "high", "pairs"} for each in ratios.values())
    assert all(0 < each["low"] <= each["median"] <= each["high"] for each in ratios.values())
    kinds = [
        "low_confidence",
        "in blocks, prefix cache",
        "in blocks, dual cache",
        "threshold",
        "one step",
        "trajectory",
    ]
    for kind in kinds:
        assert ratios[f"small: {kind} / bare"]["pairs"] == ratios[f"small: {kind} / bare, to all tokens"]["pairs"] == 2
    # Of the 16 columns the first of a block's two steps feeds all, the second those of the block.
    fed = (16 + 2) / (2 * 16)
    assert ratios["small: in blocks, dual cache / none, tokens"] == {"median": fed, "low": fed, "high": fed, "pairs": 0}
    assert set(found["views_per_second"]) == {f"small: {name}" for name in bench.ESTIMATORS}
    printed = capsys.readouterr().out
    assert all(f"| {name} |" in printed for name in ratios)
