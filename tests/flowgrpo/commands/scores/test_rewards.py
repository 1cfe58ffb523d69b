"""`flowgrpo rewards`, and its table in the docs."""

from pathlib import Path

from flowgrpo.commands.scores.page import table

PAGE = Path(__file__).parents[4] / "docs" / "reference" / "rewards.md"


def test_rewards_are_listed_and_described(printed):
    rows = {row["name"]: row for row in printed("rewards", "--format", "json")}
    assert rows["shapes"]["range"] == "0 to 1"
    assert set(rows["jpeg_size"]) == {"name", "measures", "inputs", "range", "weights", "licence", "memory"}
    assert rows["pickscore"]["memory"] == {
        "float32": 3_900_000_000,
        "bfloat16": 1_950_000_000,
        "float16": 1_950_000_000,
    }
    assert set(rows["jpeg_size"]["memory"].values()) == {0}
    assert "Share of each caption" in printed("rewards", "shapes")
    assert "memory" not in printed("rewards", "shapes")
    assert "memory   weights 32.8 GB in float32, 16.4 GB in bfloat16 or float16; a batch takes more" in printed(
        "rewards", "deqa"
    )


def test_the_table_of_the_page_is_that_of_the_rewards():
    written = table()
    assert f"\n{written}\n" in PAGE.read_text(), (
        f"docs/reference/rewards.md: put flowgrpo.commands.scores.page.table there:\n{written}"
    )
    assert (
        "| `pickscore` | preference (PickScore) | image, prompt | yuvalkirstain/PickScore_v1, 3.9 GB; no licence found"
        in written
    )
