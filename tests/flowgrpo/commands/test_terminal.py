"""File names, prompts and words of others on the terminal and in log.txt: seen as they are, and steering nothing."""

import io
import sys

import pytest
from accelerate import Accelerator
from rich.table import Table

from flowgrpo.commands.terminal import out, say
from flowgrpo.data import tables
from flowgrpo.schema.readable import one_line, readable
from flowgrpo.training.reports.report import LOGGER, Report

ORDINARY = "é, 漢字, עברית, عربي, 👩‍👧, 🏴󠁧󠁢󠁥󠁮󠁧󠁿, e\u0301 and \u200fmarks"
HOSTILE = "\x1b[2J\x1b]0;title\x07\r\x9b1m\x7f\x00\u202egnp.exe\u202c\u2066\u2069\u2028\udcff\n"
SEEN = r"\x1b[2J\x1b]0;title\x07\r\x9b1m\x7f\x00\u202egnp.exe\u202c\u2066\u2069\u2028\udcff\n"


def test_ordinary_texts_are_as_they_were_and_others_are_seen():
    assert readable(ORDINARY + "\ttab\nline") == ORDINARY + "\ttab\nline"
    assert one_line(ORDINARY + HOSTILE) == ORDINARY + SEEN
    assert readable(HOSTILE) == SEEN[:-2] + "\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("gallery {}", "{}: there is no such folder"),
        ("train {}", "{}: no such config file"),
        ("sample shapes --out o --prompts {}", "--prompts: there is no file {}"),
        ("sample shapes --out o --prompt a --adapter {}", "--adapter: there is no file or folder "),
        ("score jpeg_size --samples {}", "--samples: there is no folder {}"),
        ("score ./{}.py:f --samples .", "there is no file {}.py"),
        ("serve ./{}.py:f", "there is no file {}.py"),
        ("export {} --out o", "{}: there is no run here"),
        ("{}", "No such command"),
    ],
)
def test_a_sentence_is_one_line_whatever_was_written(tmp_path, monkeypatch, refused, words, said):
    monkeypatch.chdir(tmp_path)
    written = (ORDINARY + HOSTILE).replace("\0", "")  # which ends an argument
    told = refused(*(word.format(written) for word in words.split()))
    assert said.format(ORDINARY + SEEN.replace(r"\x00", "")) in told
    assert one_line(f"flowgrpo: {told}") == f"flowgrpo: {told}"


def test_what_is_printed_steers_nothing(capsys):
    table = Table("\x1b[2J", "\u202e", box=None)
    table.add_row("\r\x9b1m", "\udcff")
    for printed, seen in ((HOSTILE, SEEN[:-2]), (table, r"\x1b[2J \u202e \r\x9b1m \udcff")):
        out.print(printed, soft_wrap=True)
        told = capsys.readouterr().out
        assert seen in " ".join(told.split())
        assert readable(told) == told


def test_what_is_said_fits_a_terminal_of_any_encoding(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "utf-8")  # strict, as a pipe's may be
    monkeypatch.setattr(sys, "stderr", stream)
    say(HOSTILE)
    stream.flush()
    assert stream.buffer.getvalue().decode() == SEEN + "\n"


def test_warnings_are_lines_in_the_log_and_on_the_terminal(tmp_path, capsys):
    with Report(tmp_path, Accelerator(cpu=True), 1):
        LOGGER.warning("the reward failed (%s)", ORDINARY + HOSTILE)
    (written,) = (tmp_path / "log.txt").read_text(encoding="utf-8").splitlines()
    assert written.endswith(f" the reward failed ({ORDINARY + SEEN})")
    assert capsys.readouterr().err == f"warning the reward failed ({ORDINARY + SEEN})\n"


def test_a_line_that_was_cut_off_is_told_in_one(tmp_path):
    folder = tmp_path / HOSTILE.replace("\0", "")
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("{")
    with pytest.warns(UserWarning, match="cut off") as told:
        assert tables.log(folder / "metrics.jsonl") == []
    assert one_line(str(told[0].message)) == str(told[0].message)


def test_the_evaluation_of_several_rewards_shows_each(tmp_path, capsys):
    line = {
        "step": 3,
        "phase": "eval",
        "reward/mean": 0.5,
        "reward/std": 0.1,
        "reward/count": 4,
        "reward/warm/mean": 0.5,
    }
    with Report(tmp_path, Accelerator(cpu=True), 4) as report:
        report.write(line)
        report.write({**line, "reward/shapes/mean": None})
    told = capsys.readouterr().err.splitlines()
    assert told == ["step 3: held-out reward 0.500", "step 3: held-out reward 0.500 (warm 0.500, shapes none)"]
