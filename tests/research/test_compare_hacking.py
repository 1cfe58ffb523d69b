"""What the comparison of exploited proxies trains, and what it reads out of the metrics of runs; the runs are made up."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from flowgrpo import config
from rewards.base import load
from rewards.shapes import shapes

SCRIPTS = Path(__file__).parents[2] / "research"


def loaded(monkeypatch, name):
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, found)
    spec.loader.exec_module(found)
    return found


@pytest.fixture
def script(monkeypatch):
    return loaded(monkeypatch, "compare_hacking")


@pytest.mark.parametrize(
    ("way", "combine", "weight", "caution"),
    [("mean", "sum", 1 / 3, 0.1), ("worst", "worst", 1, 0.1), ("cautious", "cautious", 1, 1.0)],
)
def test_the_ways_differ_in_how_rewards_are_put_together_alone(script, tmp_path, way, combine, weight, caution):
    line = script.command(way, 3, tmp_path, 32)
    chosen = config.load(Path(line[4]), line[5:])
    assert [use.weight for use in chosen.rewards] == pytest.approx([weight] * 3)
    assert [use.use.rpartition(":")[2] for use in chosen.rewards] == list(script.PROXIES)
    baseline = chosen.algorithm.baseline
    assert (baseline.combine, baseline.caution, baseline.name) == (combine, caution, "group_mean")
    assert (chosen.run.seed, chosen.run.folder, chosen.train.iterations) == (3, tmp_path / f"{way}-seed3", 32)
    assert [use.name for use in chosen.eval_rewards] == ["truth"]
    assert chosen.run.resume == "auto"


def test_a_group_is_compared_by_the_mean_of_the_proxies(script, monkeypatch, tmp_path):
    line = script.command("wins", 0, tmp_path, 32)
    chosen = config.load(Path(line[4]), line[5:])
    assert [use.use.rpartition(":")[2] for use in chosen.eval_rewards] == ["shapes", *script.PROXIES]
    planted = loaded(monkeypatch, "planted_rewards")
    assert [use.options for use in chosen.rewards] == [{"compare": f"{planted.__file__}:better", "both_orders": False}]
    pictures = torch.rand(6, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    prompt = "a red circle above a blue square"
    means = sum(getattr(planted, name)(pictures, [prompt] * 6) for name in script.PROXIES)
    wins = load("preference", options=chosen.rewards[0].options)(pictures, [prompt] * 6, {})
    assert wins.argsort().tolist() == means.argsort().tolist()


@pytest.mark.parametrize(
    ("curve", "below", "half"),
    [
        ({0: 0.4, 4: 0.5, 8: 0.3, 12: 0.41, 16: 0.39, 20: 0.1}, "iteration 16", "iteration 20"),
        ({0: 0.4, 4: 0.3, 8: 0.1}, "iteration 4", "iteration 8"),
        ({0: 0.4, 4: 0.1, 8: 0.4}, "never", "never"),
    ],
)
def test_a_reward_has_fallen_from_where_it_stays_below(script, curve, below, half):
    assert (script.fallen(curve, 1.0), script.fallen(curve, 0.5)) == (below, half)


def test_the_table_is_of_complete_runs(script, tmp_path, capsys):
    for name, truth in (("worst-seed1", {0: 0.25, 4: 0.5, 8: 0.1}), ("mean-seed0", {0: 0.25, 4: 0.5})):
        lines = [{"phase": "train", "step": 1}]
        for step, value in truth.items():
            parts = {f"reward/{proxy}/mean": value + k for k, proxy in enumerate(script.PROXIES)}
            lines.append({"phase": "eval", "step": step, "reward/truth/mean": value, **parts})
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    script.report(tmp_path, 8)
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert rows == ["| `worst` | 1 | 0.250 | 0.500 after 4 | 0.100 | 1.10 | iteration 8 | iteration 8 |"]


def test_a_proxy_is_right_until_its_own_shortcut_pays(monkeypatch):
    planted = loaded(monkeypatch, "planted_rewards")
    paper = torch.tensor([0.96, 0.945, 0.91])[:, None, None].expand(3, 64, 64)
    chequered = (paper - 0.2).clamp(min=0) + 0.05 * (torch.arange(64) % 2)
    red = paper.clone()
    red[1:] = 0.3
    images, prompts = torch.stack([paper, paper * 0.7, chequered, red]), ["a red circle"] * 4
    truth = torch.tensor(shapes(images, prompts), dtype=torch.float64)
    paid = {name: getattr(planted, name)(images, prompts) - truth for name in ("vivid", "dark", "busy")}
    assert all(each[0] == 0 for each in paid.values())
    assert paid["dark"][1].item() == pytest.approx((1 - 0.7 * (0.96 + 0.945 + 0.91) / 3 - 0.144) / 0.019, rel=1e-5)
    assert paid["vivid"][1] == paid["busy"][1] == 0
    assert paid["busy"][2].item() == pytest.approx((0.05 - 0.033) / 0.007, rel=1e-4)
    assert paid["vivid"][3].item() == pytest.approx((0.66 - 0.157) / 0.027, rel=1e-5)
