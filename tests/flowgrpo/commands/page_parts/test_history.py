"""A mean before training and one after it are told as a gain only with how many samples each is of."""

import re

import pytest
from planted_run import evaluated, run_of, trained, with_samples

from flowgrpo import config
from flowgrpo.commands.inspect.gallery import write_gallery
from flowgrpo.commands.page_parts.history import held_out_words
from flowgrpo.commands.report import write_report
from flowgrpo.training.reports import model_card

FEWER = "n = 10 and 7, so not of the same samples"


def lines(first, last, **fields):
    """Evaluations before and after one iteration; the last one's mean is of 7 samples."""
    return [evaluated(0, first, 1.0), trained(1, 0.3), evaluated(2, last, 0.4, **{"reward/count": 7} | fields)]


def shown(page, tag):
    """The captions of headlines, without their marks."""
    return [" ".join(re.sub("<[^>]*>", " ", part).split()) for part in re.findall(tag, page)]


@pytest.mark.parametrize(
    ("first", "last", "fields", "said"),
    [
        (0.25, 0.5, {}, f"held-out reward 0.250 -> 0.500 ({FEWER})"),
        (0.25, 0.5, {"reward/count": 12}, "held-out reward 0.250 -> 0.500 (n = 10 and 12, so not of the same samples)"),
        (0.25, 0.5, {"reward/count": 10}, "held-out reward 0.250 -> 0.500"),
        (None, 0.5, {}, "held-out reward none -> 0.500"),
        (0.25, None, {"reward/count": 0}, "held-out reward 0.250 -> none"),
    ],
)
def test_the_last_line_of_a_run_marks_a_mean_of_fewer_samples(first, last, fields, said):
    assert held_out_words(lines(first, last, **fields)) == said
    assert held_out_words([]) is held_out_words(lines(first, last)[:2]) is None  # there is no before and after


def test_every_page_marks_a_mean_of_fewer_samples(tmp_path):
    run = with_samples(run_of(tmp_path / "r", lines(0.25, 0.5)), [0.1])
    other = with_samples(run_of(tmp_path / "s", lines(0.25, 0.5, **{"reward/count": 10})), [0.1])
    page, report = write_gallery([run], tmp_path / "g.html"), write_report(run, tmp_path / "r.html")
    (gallery,) = shown(page.read_text(), r'<p class="caption">(.*?)</p>')
    assert gallery.startswith(f"mean held-out reward, before and after training; {FEWER}, standard errors ")
    said = shown(report.read_text(), r'<p class="soft">(mean held-out.*?)</p>')
    (words,) = said
    assert words.partition(", standard")[0] == f"mean held-out reward, before training and now; {FEWER}"
    assert f"now (+0.250; {FEWER})." in write_report(run, tmp_path / "r.md").read_text()
    compared = write_gallery([run, other], tmp_path / "c.html").read_text()
    first, second = re.findall(r"<li><span class=\"badge.*?</li>", compared, re.DOTALL)
    assert FEWER in first
    assert "n = " not in second


@pytest.mark.parametrize(("first", "last"), [(None, 0.5), (0.25, None)])
def test_no_page_tells_a_gain_where_one_of_the_two_has_no_mean(tmp_path, first, last):
    """The mean between would be taken for that before training, or for that after it."""
    every = [
        evaluated(0, first, 1.0),
        trained(1, 0.3),
        evaluated(1, 0.4, 0.5),
        trained(2, 0.3),
        evaluated(2, last, 0.4),
    ]
    run = with_samples(run_of(tmp_path / "r", every), [0.1])
    for page in (write_gallery([run], tmp_path / "g.html"), write_report(run, tmp_path / "r.html")):
        assert '<p class="headline">' not in page.read_text()
    assert "before training" not in write_report(run, tmp_path / "r.md").read_text()


@pytest.mark.parametrize(
    ("every", "said"),
    [
        (lines(0.25, 0.5), "Held-out reward: 0.250 before training (n = 10), 0.500 at step 2 (n = 7)."),
        (lines(0.25, 0.5, **{"reward/count": 10}), "Held-out reward: 0.250 before training, 0.500 at step 2."),
        ([evaluated(0, None, 1.0), *lines(0.25, 0.5)[2:]], "Held-out reward: 0.500 at step 2."),
    ],
)
def test_a_model_card_says_of_how_many_samples_its_means_are(tmp_path, every, said):
    run = run_of(tmp_path / "r", every)
    settings = config.validate({"model": {"path": "shapes"}, "rewards": "shapes"})
    assert said in model_card.heading(run, settings, library="diffusers", kind="full", step=2, task="text-to-image")
