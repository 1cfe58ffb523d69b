"""Cut a finished run back to what a killed one leaves, for tests that resume."""

import json
import shutil


def cut_back(folder, step):
    """Delete the checkpoints and metrics of later steps in a run's folder."""
    checkpoints = sorted((folder / "checkpoints").iterdir())
    assert f"step-{step:06d}" in [checkpoint.name for checkpoint in checkpoints[:-1]]
    for checkpoint in checkpoints:
        if checkpoint.name > f"step-{step:06d}":
            shutil.rmtree(checkpoint)
    place = folder / "metrics.jsonl"
    lines = place.read_text().splitlines(keepends=True)
    place.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))
