"""The script that makes wrong changes, on a tree of one function: what its test sees dies, and what it does not survives."""

import multiprocessing

import pytest

SUMS = "def add(a, b):\n    return a + b\n\n\ndef half(a):\n    return a / 2\n"
TEST = "from samplers.sums import add, half\n\n\ndef test_sums():\n    assert add(2, 2) == 4\n    assert half(4) == 2\n"
TABLE = """
samplers/sums.py:
  tests: [tests/test_sums.py]
  changes:
    - 'a + b => a - b'
    - 'a + b => a * b'
    - change: 'a / 2 => a * 0.5'
      same: 'a half is a power of 2'
"""


@pytest.fixture
def mutants(script, monkeypatch):
    found = script("mutants")
    monkeypatch.setattr(found, "SERVED", multiprocessing.get_context("spawn"))  # of few tests, and nothing stays behind
    return found


@pytest.fixture
def tree(tmp_path):
    for name, text in {"samplers/__init__.py": "", "samplers/sums.py": SUMS, "tests/test_sums.py": TEST}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "table.yaml").write_text(TABLE)
    return tmp_path


def run(mutants, tree, *arguments):
    return mutants.main(list(arguments), root=tree, table=tree / "table.yaml")


def test_what_no_test_sees_is_told_and_the_tree_stays_as_it_is(mutants, tree, capsys):
    assert run(mutants, tree) == 1
    told = capsys.readouterr().out
    table = "| file | tried | survive |\n|---|---|---|\n| samplers/sums.py | 2 | 1 |\n"
    assert told.startswith(f"survives samplers/sums.py: a + b => a * b\n{table}")
    assert "2 wrong changes, 1 survive, 1 that change nothing are left out" in told
    assert (tree / "samplers" / "sums.py").read_text() == SUMS
    assert not list(tree.rglob("__pycache__"))


def test_where_all_die_the_status_is_0(mutants, tree):
    assert run(mutants, tree, "--only", "a - b", "--jobs", "2") == 0


def test_tests_that_fail_without_a_change_say_nothing_of_it(mutants, tree):
    (tree / "tests" / "test_sums.py").write_text(TEST.replace("== 4", "== 5"))
    with pytest.raises(RuntimeError, match=r"tests/test_sums\.py: they fail without any change"):
        run(mutants, tree)


@pytest.mark.parametrize(
    ("written", "instead", "said"),
    [
        ("a + b => a - b", "a + c => a - c", r"samplers/sums\.py: 'a \+ c' is there 0 times, not once"),
        ("a + b => a - b", "return => raise", r"samplers/sums\.py: 'return' is there 2 times, not once"),
        ("tests/test_sums.py", "tests/test_none.py", r"its test tests/test_none\.py is missing"),
        (TABLE, 2 * TABLE, r"samplers/sums\.py: it has two entries, make them one"),
    ],
)
def test_an_entry_that_fits_no_longer_is_named(mutants, tree, written, instead, said):
    (tree / "table.yaml").write_text(TABLE.replace(written, instead))
    with pytest.raises(ValueError, match=said):
        run(mutants, tree)


def test_the_table_fits_the_code(mutants):
    """Each change is of a text that its file has once."""
    found = mutants.read(mutants.TABLE, mutants.ROOT)
    assert len(found) >= 120
    assert len(set(map(str, found))) == len(found)
