"""`flowgrpo rewards`."""

import json

from flowgrpo.cli import main


def test_rewards_are_listed_and_described(capsys):
    assert main(["rewards", "--format", "json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["shapes"]["range"] == "0 to 1"
    assert set(rows["jpeg_size"]) == {"name", "inputs", "range", "weights", "licence"}
    assert main(["rewards", "shapes"]) == 0
    assert "Share of each caption" in capsys.readouterr().out
