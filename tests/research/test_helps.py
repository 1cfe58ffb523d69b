"""Every script that takes options tells them."""

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "research"


@pytest.mark.parametrize("name", [file.stem for file in sorted(SCRIPTS.glob("bench_*.py"))])
def test_a_benchmark_tells_its_options(script, name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        script(name).main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")
