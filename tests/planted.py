"""What runs leave, planted: a small tree (a brush of three branches, one of them pruned, and a twig), samples, metrics."""

import json

import numpy as np
import yaml
from PIL import Image

from flowgrpo.training.reports.tree_store import KeptNode, KeptTree, TreeFolder, encode_picture

SIGMAS = (1.0, 0.8, 0.4, 0.0)


def shade(grey):
    return encode_picture(np.full((1, 6, 6, 4), [grey, grey, grey, 255], dtype=np.uint8))


def node(parent, step, total=None, **fields):
    drawn = {"kernel": "flow_sde 0.7", "noise": 0.3, "trained": True, "updated": True} if "advantage" in fields else {}
    rewards = () if total is None else (total,)
    usual = {"estimated": step < 3, "rewards": rewards, "total": total, **drawn}
    return KeptNode(parent=parent, step=step, sigma=SIGMAS[step], **{**usual, **fields})


FIRST = (0, 1)  # a comparison set
NODES = (
    node(None, 0, 0.0, seed=5, picture=shade(40)),  # 0
    node(0, 1, 0.1, advantage=1.0, unit=0, compared=FIRST, picture=shade(80), weight=1.0, log_prob=-1.25),  # 1
    node(0, 1, 0.2, advantage=-0.5, unit=1, compared=FIRST, picture=shade(120), weight=1.0),  # 2
    node(0, 1, 0.2, advantage=-0.5, unit=2, compared=FIRST, updated=False),  # 3, pruned
    node(1, 2, 0.7, kernel="ode"),  # 4
    node(4, 3, 0.9, kernel="ode", picture=shade(160)),  # 5
    node(2, 3, 0.3, kernel="ode"),  # 6
    node(3, 3, 0.3, kernel="ode"),  # 7
    node(0, 3, 0.6, kernel="ode", twig=True),  # 8
)


def tree(nodes=NODES, **fields):
    usual = {"step": 1, "group": 0, "prompt": "a cat", "sigmas": SIGMAS, "names": ("mine",), "size": (6, 6)}
    return KeptTree(**{**usual, **fields}, nodes=tuple(nodes))


def run_with(folder, *trees):
    for each in trees:
        TreeFolder(folder).write([each])
    return folder


def sampled(folder, lines):
    """Write grey pictures: `shade` of each line, and what the manifest says of it."""
    folder.mkdir(parents=True)
    told = []
    for index, line in enumerate(lines):
        shade = line["shade"]
        Image.fromarray(np.full((6, 6, 3), shade, dtype=np.uint8)).save(folder / f"{index}-{shade}.png")
        told.append({**{key: value for key, value in line.items() if key != "shade"}, "file": f"{index}-{shade}.png"})
    (folder / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    return folder


def trained_run(folder, lines, evaluated, *, config=None, environment=None):
    """Plant a run that was evaluated to some metrics by step; an iteration takes 100 evaluations and 2.5 seconds.

    `config` adds to that of one trained reward, `r`.
    """
    sampled(folder / "samples", lines)
    rewards = [{"use": "./mine.py:r", "name": None, "weight": 1.0, "offset": 0.0, "options": {}}]
    usual = {"kind": "flow", "rewards": rewards, "eval_rewards": [], "algorithm": {"preset": "flow_grpo"}}
    (folder / "config.yaml").write_text(yaml.safe_dump({**usual, **(config or {})}))
    (folder / "environment.json").write_text(json.dumps(environment or {"python": "3.11", "folder": str(folder)}))
    train = {
        "phase": "train", "reward/mean": 0.5, "time/rollout": 2.0, "time/update": 0.5, "cost/model_evaluations": 100,
    }  # fmt: skip
    metrics = [{"step": step, "phase": "eval", **numbers} for step, numbers in evaluated.items()]
    metrics += [{"step": step, **train} for step in range(1, max(evaluated, default=0) + 1)]
    metrics.sort(key=lambda line: (line["step"], line["phase"] == "eval"))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return folder
