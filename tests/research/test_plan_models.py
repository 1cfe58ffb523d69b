import importlib.util
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


def row_of(name):
    """Return the row of a config in the page's table of planned memory."""
    page = (ROOT / "docs/research/configs.md").read_text().splitlines()
    (row,) = [line for line in page if line.startswith(f"| `{name}` | {plan_models.gpu_of(name)} GB | ")]
    return row


def peak_of(name):
    return max(float(cell.split()[0]) for cell in row_of(name).split("|")[3:9] if cell.strip())


def test_each_config_names_the_smallest_card_that_offers_its_peak():
    for name in configs.names():
        fitting = [size for size, offered in plan_models.OFFERED.items() if peak_of(name) <= offered]
        assert plan_models.gpu_of(name) == fitting[0]


def test_the_head_of_each_config_says_what_the_page_does():
    for name in configs.names():
        assert f"at least {peak_of(name)} GiB as planned" in configs.head(name)["GPU"]


FAST = ("flux2-klein-4step", "llada-8b", "sd35-medium", "stable-audio-3", "z-image-turbo")  # seconds each


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.zoo) for n in configs.names()])
def test_the_page_says_what_is_planned(name, tmp_path):
    assert plan_models.row(name, plan_models.planned(name, tmp_path)) == row_of(name)
