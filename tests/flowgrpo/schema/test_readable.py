"""What others wrote, on the terminal."""

from flowgrpo.cli import main
from flowgrpo.schema.readable import counted, one_line


def test_a_line_is_one_and_steers_nothing():
    assert one_line("a\nb\tc\u2028d \x1b[31m \x85 \ud800") == r"a\nb c\u2028d \x1b[31m \x85 \ud800"


def test_of_a_long_line_both_ends_are_kept():
    whole = "".join(f"{i:05}" for i in range(1000))
    line = one_line(whole)
    first, last = line.split(" ... ")
    assert len(line) == 1000
    assert whole.startswith(first)
    assert (whole[-200:], one_line(whole[:1000])) == (last, whole[:1000])


def test_a_refusal_is_one_short_line_whatever_was_written(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("model: {path: shapes}\n")
    for override in ("prompts.pick=" + "x" * 90_000, "train.a\x1b[2J\u2028=3", "x" * 90_000):
        assert main(["plan", str(tmp_path / "a.yaml"), override]) == 2
        said = capsys.readouterr().err
        assert len(said) < 1020
        assert len(said.splitlines()) == 1
        assert "\x1b" not in said


def test_one_is_singular():
    assert [counted(number, "sample") for number in (0, 1, 2)] == ["0 samples", "1 sample", "2 samples"]
    assert [counted(2, word) for word in ("process", "batch")] == ["2 processes", "2 batches"]
    assert counted(1152, "row") == "1,152 rows"
