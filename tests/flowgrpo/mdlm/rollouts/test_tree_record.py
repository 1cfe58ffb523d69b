"""Answers that a run keeps to be looked at."""

import pytest
from runs import metrics

from flowgrpo.commands.runs import train as run
from flowgrpo.mdlm.rollouts.tree_record import CELL, EMPTY, GIVEN, canvas, cells
from flowgrpo.training.reports.samples import Text
from flowgrpo.training.reports.tree_store import TreeFolder

TEXT = Text("a b", ["q", "a", " ", "b", "<end>"], [-1, 2, 0, 1, 2])


def test_a_canvas_shows_what_was_committed_before():
    assert [canvas(TEXT, moment) for moment in range(4)] == ["q▢ ×4", "q▢ ▢ ×2", "q▢ b▢", "qa b<end>"]


def test_cells_are_coloured_by_when_their_tokens_were_committed():
    start, end = cells(TEXT, 0, 3), cells(TEXT, 3, 3)
    assert start.shape == end.shape == (2 * CELL, 4 * CELL, 4)
    assert start[0, 0].tolist() == end[0, 0].tolist() == list(GIVEN)
    assert [start[0, CELL * i].tolist() for i in (1, 2, 3)] == [list(EMPTY)] * 3
    colours = [tuple(end[0, CELL * i]) for i in (2, 3, 1)]
    assert len(set(colours)) == 3
    assert [colour[2] for colour in colours] == sorted(colour[2] for colour in colours)  # later is bluer
    assert not end[CELL:, CELL:].any()  # beyond the last token


def plain(done):
    """The training lines of a run, without its times and its memory."""
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in metrics(done.folder)]


@pytest.mark.parametrize("preset", [pytest.param("diffu_grpo", marks=pytest.mark.zoo), "trace_rl", "igpo"])
def test_the_answers_of_a_run_are_kept_and_change_nothing(settings, preset, tmp_path):
    chosen = {"algorithm__preset": preset, "train__iterations": 1}
    kept = run.train_config(settings(**chosen, run__name="kept", run__trees={"every": 1, "prompts": 1}))
    assert plain(kept) == plain(run.train_config(settings(**chosen, run__name="plain")))
    for step, tree in enumerate(TreeFolder(kept.folder).read(), 1):
        assert (tree.step, tree.group) == (step, 0)
        ends = [node for node in tree.nodes if not node.estimated]
        starts = [node for node in tree.nodes if node.parent is None]
        assert len(ends) == len(starts) > 1
        assert all("▢" not in node.text and node.sigma == 0 and node.total is not None for node in ends)
        if preset != "igpo":  # which gives hints
            assert {(node.text, node.sigma) for node in starts} == {("▢ ×4", 1)}
        assert sum(node.advantage for node in ends) == pytest.approx(0, abs=1e-4)
        assert tree.sigmas == tuple(sorted(tree.sigmas, reverse=True))
        assert len({node.picture for node in tree.nodes}) > len(ends)
    assert (kept.folder / "trees.html").is_file()
