"""Half precision on two real processes."""

import json
import math
import subprocess
import sys

from safetensors.torch import load_file


def test_in_half_precision_two_processes_train_where_one_has_only_solved_prompts(workplace):
    """Of four prompts, one in each group, three are solved: in each update at least one process has nothing to train on."""
    (workplace / "mine.py").write_text(
        "def redness(images, prompts):\n"
        "    values = images[:, 0].mean((1, 2)).float().cpu().tolist()\n"
        "    return [v if p == 'a red circle' else 1.0 for v, p in zip(values, prompts)]\n"
    )
    choices = ["train.groups=4", "train.iterations=1", "eval.prompts=1", "eval.save=0", "run.processes=2"]
    choices += ["model.dtype=float16", "algorithm.baseline.drop_zero=true", "algorithm.objective.kl.beta=0"]
    command = [sys.executable, "-m", "flowgrpo", "train", "tiny.yaml", *choices]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    run = workplace / "runs" / "t"
    line = next(
        line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if line["phase"] == "train"
    )
    assert line["policy/skipped_updates"] == 0
    assert 0 < line["policy/grad_norm"] < math.inf
    kept = load_file(run / "checkpoints" / "step-000001" / "weights.safetensors")
    assert all(tensor.isfinite().all() for tensor in kept.values())
