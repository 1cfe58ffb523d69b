"""Decoders against what the public implementations return, token by token and step by step."""

import json
from pathlib import Path

import pytest
import torch
from predictors import table

from flowgrpo.mdlm.decoding.decode import decode
from flowgrpo.mdlm.decoding.decoders import build

DATA = Path(__file__).parents[3] / "data"
ROWS = json.loads((DATA / "mdlm_decoders.json").read_text())
EOS_ROWS = json.loads((DATA / "mdlm_eos_decoders.json").read_text())


def assert_same(rollout, row, branches=1):
    assert rollout.completion.tolist() == row["tokens"]
    assert rollout.step_map.tolist() == row["step_map"]
    assert rollout.nfe.tolist() == [row["model_calls"] * branches] * len(rollout.ids)


@pytest.mark.parametrize("row", [row for row in ROWS if "toy" not in row], ids=str)
def test_low_confidence_and_threshold(row):
    toy = next(other["toy"] for other in ROWS if "toy" in other and other["case"] == row["case"])
    spec = {"name": row["decoder"], "region": {"block_length": row["block_length"]}}
    if row["decoder"] == "threshold":
        spec["committer"] = {"threshold": row["threshold"]}
    else:
        spec |= {"steps": row["steps"], "cfg_scale": row.get("cfg_scale", 0.0)}
    rollout = decode(table(toy), torch.tensor(row["prompt_used"]), build(spec, row["gen_length"]))
    assert_same(rollout, row, branches=2 if "cfg_scale" in row else 1)


@pytest.mark.parametrize("row", EOS_ROWS[:-1], ids=lambda row: f"{row['decoder']}-{row.get('block_num')}")
def test_early_end_suppression_and_ascending_steps(row):
    toy = EOS_ROWS[-1]["toy"]
    spec = {"name": row["decoder"]}
    if row["decoder"] == "eoser":
        spec["steps"] = row["steps"]
    else:
        spec["region"] = {"blocks": row["block_num"]}
    rollout = decode(table(toy), torch.tensor(toy["prompt"]), build(spec, row["gen_length"], toy["eos_id"]))
    assert_same(rollout, row)
