import importlib.util
import re
from pathlib import Path

import pytest

from flowgrpo.data import configs

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("plan_models", ROOT / "research/plan_models.py")
plan_models = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(plan_models)


def test_a_row_tells_each_phase_and_the_largest_calls():
    phases = [{"phase": "rollout", "rows": 8, "total": 3 * 2**30}, {"phase": "update", "rows": 2, "total": 2**32}]
    found = {"phases": phases, "largest": {"train.rollout_batch": 40, "train.micro_batch": 5}}
    assert plan_models.row("sd35-medium", found) == "| `sd35-medium` | 24 GB |  | 3.0 (8) |  |  | 4.0 (2) |  | 40 | 5 |"


def test_the_page_has_every_config_and_each_fits_its_gpu():
    page = (ROOT / "docs/research/configs.md").read_text().splitlines()
    for name in configs.names():
        (row,) = [line for line in page if line.startswith(f"| `{name}` | {plan_models.gpu_of(name)} GB | ")]
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert max(float(cell.split(" ")[0]) for cell in cells[2:8] if cell) <= plan_models.room_of(name)
        assert min(map(int, cells[8:])) >= 1


def test_the_head_of_each_config_says_what_the_page_does():
    page = (ROOT / "docs/research/configs.md").read_text().splitlines()
    for name in configs.names():
        (row,) = [line for line in page if line.startswith(f"| `{name}` | {plan_models.gpu_of(name)} GB | ")]
        sizes = [float(cell.split()[0]) for cell in row.split("|")[3:9] if cell.strip()]
        assert f"at least {max(sizes)} GiB as planned" in configs.head(name)["GPU"]


def test_the_head_of_a_config_says_what_is_planned(tmp_path):
    name = "stable-audio-3"  # the one that is planned fastest, in half a minute
    found = plan_models.planned(name, tmp_path)
    assert found["fits"]
    said = float(re.match(r"one of \d+ GB: at least (\S+) GiB as planned", configs.head(name)["GPU"]).group(1))
    assert found["peak"] / plan_models.GIB == pytest.approx(said, abs=0.1)
