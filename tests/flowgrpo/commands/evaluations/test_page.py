import pytest
from planted_evaluation import FIRST, SECOND, planted

from flowgrpo.commands.evaluations.page import write_page
from flowgrpo.commands.evaluations.results import ASKED, SCORES, read_results
from flowgrpo.errors import InputError


def section(page, name):
    return page.partition(f'<section id="s-{name}">')[2].partition("</section>")[0]


def test_a_page_has_the_ends_of_each_top_category_and_what_was_asked(tmp_path):
    page = write_page([planted(tmp_path / "e", FIRST, rewards=("questions", "jpeg_size"))]).read_text()
    assert page.count("<section") == 2
    a = section(page, "A")
    assert "0.75 <small>± 0.25</small>" in a
    worst, best = a.split("<h3>best</h3>")
    assert "a red circle" in worst
    assert "a blue circle" in best
    assert '<li class="yes"><b>✓</b>Is it red?</li><li class="no"><b>✗</b>Is it' in worst
    assert "an owl" in section(page, "B")
    assert "a cat" not in page  # has no score
    for sentence in (
        "5 of the 9 prompts of mine.jsonl were sampled",
        "shapes: 1 of 5 samples have no score by questions and are left out",
        "Not as published.",
        "num_inference_steps 4",
    ):
        assert sentence in page
    assert "guidance_scale" not in page
    assert page.count("data:image/webp") == 4
    assert "<script>alert" not in page
    assert '<th scope="row" class="below">A - x</th>' in page


def test_several_are_compared_by_what_they_gained_and_lost(tmp_path):
    results = [planted(tmp_path / "a", FIRST, "before"), planted(tmp_path / "b", SECOND, "after")]
    page = write_page(results).read_text()
    assert (tmp_path / "a" / "compare.html").read_text() == page
    assert "lost most" not in section(page, "A")
    assert "a red circle" in section(page, "A").partition("gained most")[2]
    lost, gained = section(page, "B").split("<h3>gained most</h3>")
    assert "an owl" in lost
    assert "an owl" not in gained
    assert "a blue circle" not in section(page, "A")  # as before
    total = page.partition('<tr class="total">')[2].partition("</tr>")[0]
    # 4 prompts have scores in both: 0.5, 1, 0, 0.5 and 1, 1, 0.5, 0.
    assert "0.50 <small>± 0.20</small>" in total
    assert "+0.12</span> <small>± 0.24</small>" in total


def test_evaluations_of_different_prompts_are_not_compared(tmp_path):
    first, other = planted(tmp_path / "a", FIRST[:1]), planted(tmp_path / "b", [("another", ["A"], [1.0, 1.0])])
    with pytest.raises(InputError, match="no prompt is in both, so that nothing can be compared"):
        write_page([first, other])


def test_a_damaged_evaluation_is_named(tmp_path):
    folder = planted(tmp_path / "a", FIRST).folder
    (folder / SCORES).write_text('{"file": "0000.png"}\n{}\n')
    with pytest.raises(InputError, match=r"scores.jsonl:1: it is no line of an evaluation's scores"):
        read_results(folder)
    (folder / ASKED).write_text("[]")
    with pytest.raises(InputError, match=r"evaluation.json: it is not of an evaluation"):
        read_results(folder)
