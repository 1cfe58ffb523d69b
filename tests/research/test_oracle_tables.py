"""The command of docs/research/oracle.md, as a reader calls it: from anywhere, with nothing told to Python."""

import os
import subprocess
import sys
from pathlib import Path

import oracle_presets
import pytest

SCRIPT = Path(__file__).parents[2] / "research" / "oracle_tables.py"


def called(folder, *words):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run([sys.executable, SCRIPT, *words], cwd=folder, env=environment, capture_output=True, text=True)


def test_a_table_of_two_presets(tmp_path):
    found = called(tmp_path, "presets", "tempflow_fast", "just_grpo", "--batches", "4")
    assert found.returncode == 0, found.stderr
    head, _, row, of_text = found.stdout.splitlines()
    assert head.startswith("| preset | evaluations | size |")
    assert row.startswith("| `tempflow_fast` | 156 | ")  # of 2 seeds of 6 children: 2 x (3 + 72) and 6
    assert of_text.startswith("| `just_grpo` | 48 | ")  # of 8 texts, 3 steps and 3 likelihoods


def test_a_table_that_is_not_there_is_one_sentence(tmp_path):
    found = called(tmp_path, "flows")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("oracle_tables.py: there is no table 'flows', choose one of presets, effects,")


def test_one_batch_is_refused_and_of_two_no_step_is_compared(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["oracle_tables.py presets", "tempflow_fast", "--batches", "1"])
    with pytest.raises(SystemExit, match="2"):
        oracle_presets.main()
    assert "--batches: 1 tells no error, take 2 or more" in capsys.readouterr().err
    assert "| - |" in oracle_presets.row("tempflow_fast", batches=2)
