"""`flowgrpo rewards`."""


def test_rewards_are_listed_and_described(printed):
    rows = {row["name"]: row for row in printed("rewards", "--format", "json")}
    assert rows["shapes"]["range"] == "0 to 1"
    assert set(rows["jpeg_size"]) == {"name", "inputs", "range", "weights", "licence"}
    assert "Share of each caption" in printed("rewards", "shapes")
