"""The notebooks of docs/: their code runs, and each has been run whole."""

import json
import re
from pathlib import Path

import forked
import in_cells
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
FEWER = {
    r'"iterations": \d+': '"iterations": 1',
    r'"groups": \d+': '"groups": 2',
    r'"group_size": \d+': '"group_size": 2',
    "samples=4": "samples=1",
}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook, tmp_path):
    """With fewer iterations and samples, as the module `__main__`, as which a notebook's cells run, too."""
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    for pattern, fewer in FEWER.items():
        code = re.sub(pattern, fewer, code)
    said = tmp_path / "said"
    process = forked.process(in_cells.run, code, str(tmp_path), str(said))
    process.join()
    assert process.exitcode == 0, said.read_text()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_run_from_start_to_end(notebook):
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not any(output["output_type"] == "error" for output in outputs)
    shown = ["".join(output["data"].get("text/html", "")) for output in outputs if "data" in output]
    assert any("<figure" in page for page in shown), "samples are shown"


def test_both_wings_have_a_notebook():
    assert [path.stem for path in NOTEBOOKS] == ["images", "texts"]
