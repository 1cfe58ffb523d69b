"""The comparison of updates at fixed weights: its statistics on made-up batches, and one method on the embedded model."""

import importlib.util
import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

spec = importlib.util.spec_from_file_location(
    "compare_updates", Path(__file__).parents[2] / "research" / "compare_updates.py"
)
updates = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(updates)


def measured(batches, gains=(0.1, 0.3)):
    gram = (batches @ batches.T).tolist()
    return updates.Measured(gram=gram, evaluations=500.0, seconds=2.0, gains=list(gains), options={})


def drawn(number, size=4000, noise=3.0):
    """Batches of unit mean with a noise of so many times its length."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.full((size,), 1 / math.sqrt(size))
    return mean + noise * torch.randn(number, size, generator=generator) / math.sqrt(size)


def test_noise_is_the_variance_over_the_square_of_the_mean():
    assert measured(drawn(40)).noise() == pytest.approx(9.0, rel=0.1)
    assert measured(drawn(40)).cosine(9) == pytest.approx(1 / math.sqrt(2), rel=0.05)


def test_opposite_batches_have_no_direction():
    one = torch.ones(1, 8)
    found = measured(torch.cat([one, -one, one, -one]))
    assert found.noise() == math.inf
    assert found.cosine(4) == 0
    assert found.expected_gain(1)[0] == pytest.approx(0.2 / 2)  # as the root of 1 of 4 batches


def test_a_gain_is_scaled_by_the_cosines_and_has_the_errors_of_both():
    found = measured(drawn(20), gains=torch.linspace(0, 0.4, 100).tolist())
    gain, error = found.expected_gain(2)
    assert gain == pytest.approx(0.2 * found.cosine(2) / found.cosine(20))
    of_gains = torch.linspace(0, 0.4, 100).double().std() / 10 * found.cosine(2) / found.cosine(20)
    assert of_gains < error < 2 * of_gains


def test_a_method_that_cannot_be_run_is_named_before_any_measurement(tmp_path, capsys):
    words = ["run", str(tmp_path / "out"), "--tasks", "shapes", "--methods", "awm", "wrong=tempflow train.group_size=4"]
    with pytest.raises(SystemExit, match="2"):
        updates.main(words)
    assert "--methods wrong: train.group_size: 4 does not divide" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_one_method_is_measured_once_and_reported(tmp_path, capfd):
    words = ["run", str(tmp_path), "--tasks", "shapes", "--at", "half", "--methods", "short=awm train.groups=2"]
    options = ["--batches", "3", "--prompts", "4", "--at-once", "1"]
    updates.HALF = 1  # in this process; the workers take the whole
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(updates, "ProcessPoolExecutor", lambda number, context: ThreadPoolExecutor(number))
        updates.main([*words, *options])
        (file,) = (tmp_path / "shapes" / "half").glob("*.json")
        kept = json.loads(file.read_text())
        assert len(kept["gram"]) == 3
        assert len(kept["gains"]) == 4
        written = file.stat().st_mtime_ns
        updates.main([*words, *options])
        assert file.stat().st_mtime_ns == written
        with pytest.raises(SystemExit, match=r"'prompts': 4.*'prompts': 5"):
            updates.main([*words, "--batches", "3", "--prompts", "5"])
    updates.main(["report", str(tmp_path)])
    printed = capfd.readouterr().out
    assert "| half | shapes: cosine |" in printed
    assert "| `short` | " in printed
