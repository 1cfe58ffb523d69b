"""The fuzz, in short, and what its script says of a failure."""

import importlib.util
from pathlib import Path

import pytest
from fuzzing import configs, folders, loras, media, plugins, server, tables, weights
from fuzzing.runner import LONGEST_SENTENCE, is_sentence, run
from hypothesis import strategies as st

from rewards.files import suffixes

spec = importlib.util.spec_from_file_location("fuzz", Path(__file__).parents[2] / "scripts" / "fuzz.py")
fuzz = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fuzz)


COUNTS = {configs: 60, media: 60, folders: 40, weights: 30, loras: 40, tables: 60}


@pytest.mark.parametrize(
    ("subject", "count"),
    [(subject, count // 2) for subject, count in COUNTS.items()]
    + [pytest.param(subject, count, marks=pytest.mark.zoo) for subject, count in COUNTS.items()],
)
def test_a_case_is_accepted_or_refused_in_a_sentence(subject, count):
    found = subject.fuzz(seed=1, count=count)
    assert found.failures == ()
    assert found.cases == found.accepted + found.refused == count
    assert min(found.accepted, found.refused) > 2
    assert 0 < found.slowest < 5


def test_a_plug_in_leaves_the_process_as_it_was():
    found = plugins.fuzz(seed=1, count=40)
    assert found.failures == ()
    assert found.accepted == 40


def test_every_config_and_every_kind_of_file_is_a_case():
    assert len(configs.bases()) == 2 * (4 + 24)  # demos and built-in ones
    kinds = {name.split()[0] for name in media.seeds()}
    assert kinds > {"PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "WAV", "NPY", "MP4", "WEBM", "MOV"}
    assert ("AVIF" in kinds) == (".avif" in suffixes.PICTURES)
    assert {f"PNG {mode} 0" for mode in ("1", "L", "P", "RGBA", "I;16")} < set(media.seeds())


def test_a_failure_is_the_smallest_case_and_status_1(monkeypatch, capsys):
    def attempt(number):
        if number > 20:
            raise KeyError("broken")
        return "a: too small" if number < 3 else None

    monkeypatch.setattr(configs, "fuzz", lambda seed, count: run("configs", st.integers(0, 1000), attempt, seed, count))
    assert fuzz.main(["configs", "--seed", "3", "--count", "200"]) == 1
    told = capsys.readouterr()
    assert "configs, seed 3: " in told.out
    assert " 1 tracebacks" in told.out
    assert told.err.startswith("21: KeyError: 'broken' (")


def test_a_sentence_is_one_short_line():
    assert is_sentence("a.b: 'é' is wrong")
    for said in ("", "a\nb", "a\x1b[31m", "a\u2028b", "\ud800", "x" * (LONGEST_SENTENCE + 1)):
        assert not is_sentence(said)


def test_forty_requests_end_in_an_answer_and_leave_the_server_as_it_was():
    found = server.fuzz(seed=1, count=40)
    assert found.failures == ()
    assert found.cases == found.accepted + found.refused == 40
    assert found.accepted > 5
