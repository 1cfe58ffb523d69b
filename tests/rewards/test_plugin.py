"""Rewards of one's own as docs/reference/rewards.md tells: files, classes, groups, and an installed package."""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import forked
import pytest
import torch

from flowgrpo.cli import main
from flowgrpo.training.reports.samples import save_sample

PAGE = (Path(__file__).parents[2] / "docs/reference/rewards.md").read_text()
BLOCKS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in BLOCKS.items():
        Path(name).write_text(text)
    Path("pictures").mkdir()
    torch.manual_seed(0)
    lines = []
    for i in range(3):
        file = save_sample(torch.rand(3, 16, 16) * (i + 1) / 3, Path("pictures") / str(i)).name
        lines.append({"file": file, "prompt": "a red circle"})
    Path("pictures/manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def scored(capsys, *uses):
    assert main(["score", *uses, "--samples", "pictures", "--format", "json"]) == 0
    return [line["rewards"] for line in json.loads(capsys.readouterr().out)]


def test_the_page_s_own_rewards_run(pictures, capsys):
    assert set(BLOCKS) == {"redness.py", "sharpness.py", "rank.py"}
    found = scored(capsys, "./redness.py:redness", "./sharpness.py:Sharpness", "./rank.py:rank")
    assert [line["rank"] for line in found] == [0, 0.5, 1]
    assert found[0]["Sharpness"] < found[1]["Sharpness"] < found[2]["Sharpness"]
    assert all(abs(line["redness"]) < 0.1 for line in found)


MODULE = """
import torch


class Body(torch.nn.Module):
    def forward(self, x):
        return x.mean((1, 2, 3))


class Judge(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.scale = Body(), torch.nn.Parameter(torch.ones(()))

    def forward(self, images, prompts):
        return self.scale * self.body(images)
"""


@pytest.mark.filterwarnings("error:.*requires_grad")
def test_a_module_of_pytorch_takes_the_columns_that_its_forward_names_without_gradients(pictures, capsys):
    lines = [json.loads(line) | {"colour": "red"} for line in Path("pictures/manifest.jsonl").read_text().splitlines()]
    Path("pictures/manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Path("judge.py").write_text(MODULE)
    assert scored(capsys, "./judge.py")[2]["judge"] > 0.4
    Path("judge.py").write_text(MODULE.replace("(self, images, prompts)", "(self, images, prompts, colour)"))
    assert scored(capsys, "./judge.py:Judge")[2]["Judge"] > 0.4


def wheel(folder, entry_points):
    """A wheel of one module, as a build backend would make it."""
    path = folder / "sharpness-1.0-py3-none-any.whl"
    info = "sharpness-1.0.dist-info"
    files = {
        "sharpness.py": BLOCKS["sharpness.py"],
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: sharpness\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": entry_points,
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_an_installed_package_s_reward_has_a_name(pictures):
    announced = re.search(r'\[project.entry-points."(.*?)"\]\n(\w+) = "(.*?)"', PAGE)
    built = wheel(pictures, "[{}]\n{} = {}\n".format(*announced.groups()))
    install = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target", "site"]
    subprocess.run([sys.executable, *install, built], check=True)
    run = forked.Command(["score", announced[2], "--samples", "../pictures", "--format", "json"], {}, "site")
    said, problem = run.communicate()
    assert run.returncode == 0, problem
    values = [line["rewards"][announced[2]] for line in json.loads(said)]
    assert values == sorted(values)
    assert values[0] > 0
