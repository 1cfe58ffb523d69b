"""`flowgrpo plan CONFIG --gpu-memory GIB` on language models."""

import json

import pytest
from released import released

from flowgrpo.cli import main


@pytest.mark.usefixtures("few_objects")
def test_plan_says_whether_a_run_fits(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "small.yaml", "--gpu-memory", "2"]) == 2
    released("llada", tmp_path / "small", n_layers=1)
    (tmp_path / "p.txt").write_text("a\n")
    model, prompts = "model: {path: small, length: 8}", "prompts: {train: p.txt, eval: p.txt}"
    (tmp_path / "small.yaml").write_text(f"kind: mdlm\n{model}\n{prompts}\nrewards: [{{use: solved}}]\n")
    capsys.readouterr()
    assert main(["plan", "small.yaml", "--gpu-memory", "2", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["gpu"]
    assert found["fits"]
    assert [phase["phase"] for phase in found["phases"]] == ["rollout", "update"]
    most = found["largest"]["train.rollout_batch"]
    assert main(["plan", "small.yaml", f"train.rollout_batch={most + 1}", "--gpu-memory", "2"]) == 0
    assert f"if you set train.rollout_batch={most}" in capsys.readouterr().out
