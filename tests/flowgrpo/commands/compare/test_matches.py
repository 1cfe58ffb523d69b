"""Which samples stand side by side, and in what order."""

import numpy as np
import pytest
from PIL import Image
from planted import sampled

from flowgrpo.commands.compare.matches import changes, disagreements, matches, shown_steps
from flowgrpo.commands.compare.runs import read_runs
from flowgrpo.commands.page_parts.media import pixel_difference


def read(tmp_path, **folders):
    return matches(read_runs([sampled(tmp_path / name, lines) for name, lines in folders.items()]))


def line(prompt, step, shade, **rewards):
    return {"prompt": prompt, "seed": 1, "step": step, "shade": shade, "rewards": rewards}


def test_samples_of_one_prompt_and_seed_stand_side_by_side(tmp_path):
    other_seed = {**line("cat", 0, 10, r=0.0), "seed": 2}
    found = read(tmp_path, a=[line("dog", 0, 10), line("cat", 0, 10)], b=[line("cat", 0, 20), other_seed])
    told = [(match.prompt, match.seed, [column.card is not None for column in match.columns]) for match in found]
    assert told == [("dog", 1, [True, False]), ("cat", 1, [True, True]), ("cat", 2, [False, True])]
    assert [match.complete for match in found] == [False, True, False]


def test_lines_that_are_alike_are_matched_in_their_order(tmp_path):
    found = read(tmp_path, a=[line("cat", 0, 10), line("cat", 0, 20)], b=[line("cat", 0, 30), line("cat", 0, 40)])
    shades = [[column.final.file.stem.split("-")[1] for column in match.columns] for match in found]
    assert shades == [["10", "30"], ["20", "40"]]


def test_a_base_with_equal_bytes_is_shown_once(tmp_path):
    found = read(
        tmp_path,
        a=[line("cat", 0, 10), line("cat", 4, 20)],
        b=[line("cat", 0, 10), line("cat", 2, 30)],
        c=[line("cat", 0, 11), line("cat", 2, 30)],
        d=[line("cat", 0, 10)],  # samples of no run: nothing came before them
    )
    assert [[run.letter for run in runs] for runs, _ in found[0].bases()] == [["A", "B"], ["C"]]
    assert [[run.letter for run in runs] for runs, _ in found[0].bases(redefined=True)] == [["A"], ["B"], ["C"]]
    assert found[0].columns[3].base is None
    assert [sample.step for sample in found[0].columns[3].trained] == [0]


def test_a_base_has_the_rewards_of_all_its_runs(tmp_path):
    found = read(
        tmp_path,
        a=[line("cat", 0, 10, r=0.5, s=None), line("cat", 4, 20)],
        b=[line("cat", 0, 10, r=0.5, t=0.25), line("cat", 4, 30)],
    )
    ((_, base),) = found[0].bases()
    assert base.rewards == {"r": 0.5, "s": None, "t": 0.25}


def test_each_run_shows_its_latest_step_that_is_not_after_the_chosen_one(tmp_path):
    found = read(
        tmp_path,
        a=[line("cat", step, 10) for step in (0, 1, 4)],
        b=[line("cat", step, 10) for step in (0, 3)],
        c=[line("cat", step, 10) for step in (2, 4)],
    )
    assert shown_steps(found) == [1, 2, 3, 4]
    shown = [
        [sample.step if (sample := column.at(step)) else None for step in (1, 2, 3, 4)] for column in found[0].columns
    ]
    assert shown == [[1, 1, 1, 4], [0, 0, 3, 3], [None, 2, 2, 4]]
    views = [[sample.step for sample in column.views([1, 2, 3, 4])] for column in found[0].columns]
    assert views == [[1, 4], [0, 3], [2, 4]]
    without_training = read(tmp_path, d=[line("cat", 0, 10)], e=[line("cat", 0, 20)])
    assert shown_steps(without_training) == [0]


def test_disagreement_is_the_standard_deviation_of_the_last_rewards(tmp_path):
    """Of 0.2, 0.8: 0.3; of 0, 0.3, 0.9 the mean is 0.4 and the variance (0.16 + 0.01 + 0.25) / 3."""
    found = read(
        tmp_path,
        a=[line("cat", 4, 10, r=0.2), line("dog", 4, 10, r=0.0), line("cow", 4, 10, r=5.0)],
        b=[line("cat", 4, 20, r=0.8), line("dog", 4, 20, r=0.3)],
        c=[line("dog", 4, 20, r=0.9)],
    )
    assert disagreements(found, True) == pytest.approx([0.3, 0.14**0.5, 0])
    assert found[0].apart(4) == "B − A: +0.600"
    assert found[1].apart(4) == "spread 0.37"
    assert found[2].apart(4) == ""


def test_runs_of_different_rewards_disagree_by_those_they_share_each_in_its_own_scale(tmp_path):
    """`big` is 0, 400, 100, 100 (mean 150, variance 22500: 150), so its shares are 200 / 150 and 0; `r` is 1, 1, 0, 1
    (variance 3/16), so 0 and 0.5 / sqrt(3/16); both are halved by the mean over two names."""
    found = read(
        tmp_path,
        a=[line("cat", 4, 10, big=0, r=1, own=7), line("dog", 4, 10, big=100, r=0, own=1)],
        b=[line("cat", 4, 20, big=400, r=1), line("dog", 4, 20, big=100, r=1)],
    )
    assert disagreements(found, False) == pytest.approx([2 / 3, 0.25 / (3 / 16) ** 0.5])
    nothing_shared = read(tmp_path, c=[line("cat", 4, 10, mine=1)], d=[line("cat", 4, 20, yours=2)])
    assert disagreements(nothing_shared, False) == [0]


def test_what_changed_most_did_so_in_one_of_the_runs_up_or_down(tmp_path):
    found = read(
        tmp_path,
        a=[line("cat", 0, 10, r=0.5), line("cat", 4, 10, r=0.6), line("dog", 0, 10, r=0.1), line("dog", 4, 9, r=0.3)],
        b=[line("cat", 0, 10, r=0.5), line("cat", 4, 10, r=0.0), line("cow", 4, 10, r=9.0)],
    )
    assert changes(found, True) == pytest.approx([0.5, 0.2, 0])


def test_changes_of_totals_that_cannot_be_compared_are_in_units_of_each_run(tmp_path):
    """A's gains of 10 and 30 have a deviation of 10, B's of 0.1 and 0.3 one of 0.1."""
    found = read(
        tmp_path,
        a=[line("cat", 0, 10, r=0), line("cat", 4, 10, r=10), line("dog", 0, 10, r=0), line("dog", 4, 9, r=30)],
        b=[line("cat", 0, 10, s=0), line("cat", 4, 10, s=0.3), line("dog", 0, 10, s=0), line("dog", 4, 10, s=0.1)],
    )
    assert changes(found, False) == pytest.approx([3, 3])
    assert changes(found, True) == pytest.approx([10, 30])


def test_without_any_reward_pixels_tell_what_changed(tmp_path):
    """Grey 10 to grey 61 is 51 / 255."""
    found = read(
        tmp_path,
        a=[line("cat", 0, 10), line("cat", 4, 10), line("dog", 0, 10), line("dog", 4, 12)],
        b=[line("cat", 0, 10), line("cat", 4, 61)],
    )
    assert changes(found, True) == pytest.approx([0.2, 2 / 255])


def test_pictures_of_two_sizes_are_compared_at_the_first_ones_and_texts_are_not(tmp_path):
    for name, grey, side in (("a", 0, 4), ("b", 255, 8)):
        Image.fromarray(np.full((side, side, 3), grey, np.uint8)).save(tmp_path / f"{name}.png")
    assert pixel_difference(tmp_path / "a.png", tmp_path / "b.png") == 1
    for other in ("b.json", "b.mp4", "b.mov", "B.WebM", "b.WAV"):
        assert pixel_difference(tmp_path / "a.png", tmp_path / other) is None
