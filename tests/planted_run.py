"""A small run as `flowgrpo train` leaves it, with numbers from which a report can be checked by hand."""

import json

import torch
import yaml
from planted import tree

from flowgrpo.training.reports.samples import save_sample
from flowgrpo.training.reports.tree_store import TreeFolder

WILD = "<img src=x onerror=alert(1)></script><script>alert(2)</script>&amp; | `x` " + 4000 * "w"


def use(name):
    return {"use": f"./rewards.py:{name}", "name": None, "weight": 1.0, "offset": 0.0}


CONFIG = yaml.safe_load("""
kind: flow
model: {path: shapes, dtype: float32, lora: {rank: 8, path: null}, call: {height: 64}}
prompts: {train: "shapes:train", eval: "shapes:eval"}
rewards: [{use: "./rewards.py:mine", name: null, weight: 1.0, offset: 0.0}]
eval_rewards: [{use: "./rewards.py:watched", name: null, weight: 1.0, offset: 0.0}]
algorithm:
  preset: flow_grpo
  tree: {name: chain}
  kernel: {name: flow_sde}
  baseline: {name: group_mean, combine: sum}
  objective: {name: clip, clip_range: 0.0001, kl: {form: exact, beta: 0.04}}
train: {iterations: 4, groups: 2, group_size: 5, updates: 1, learning_rate: 0.001, optimizer: {name: adamw}}
eval: {every: 2, prompts: 10, watch: 3}
run: {seed: 7}
""")
ENVIRONMENT = {
    "python": "3.11.7", "platform": "Linux", "versions": {"flowgrpo": "0.1.0", "torch": "2.9.0"}, "device": "a GPU",
    "processes": 2, "git": "0123456789abcdef", "git_dirty": True,
}  # fmt: skip


def evaluated(step, mean, watched, **fields):
    return {
        "step": step, "phase": "eval", "reward/mean": mean, "reward/std": 0.3, "reward/count": 10,
        "reward/mine/mean": mean, "reward/watched/mean": watched, "cost/model_evaluations": 50, "cost/decoded": 10,
        "time/eval": 5.0, **fields,
    }  # fmt: skip


def trained(step, mean, **fields):
    return {
        "step": step, "phase": "train", "reward/mean": mean, "reward/std": 0.1, "reward/mine/mean": mean,
        "reward/lost": 0, "groups/zero_std_fraction": 0.5, "policy/max_abs_log_ratio": 0.0,
        "policy/mean_abs_log_ratio": 0.001, "policy/clip_fraction": 0.1, "policy/kl": None, "policy/grad_norm": 1.0,
        "policy/skipped_updates": 0, "policy/learning_rate": 0.001, "cost/model_evaluations": 140,
        "cost/rollout_evaluations": 100, "cost/update_evaluations": 40, "cost/backward_evaluations": 30,
        "cost/decoded": 20, "time/rollout": 4.0,
        "time/reward": 0.5, "time/update": 1.0, "memory/peak_bytes": 1 << 30, **fields,
    }  # fmt: skip


_SECOND = {"groups/zero_std_fraction": 0.25, "policy/grad_norm": 3.0, "reward/lost": 2, "memory/peak_bytes": 3 << 29}
LINES = (evaluated(0, 0.2, 1.0), trained(1, 0.3), trained(2, 0.5, **_SECOND), evaluated(2, 0.5, 0.4))


def written(lines):
    return "".join(json.dumps(line) + "\n" for line in lines)


def run_of(folder, lines=LINES, *, config=CONFIG, warnings=()):
    """Write a run's folder with a config, metrics and a log."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
    if lines:
        (folder / "metrics.jsonl").write_text(written(lines))
    (folder / "log.txt").write_text("".join(f"{line}\n" for line in warnings))
    return folder


def with_samples(folder, rewards, *, step=2, prompts=None):
    """Add a picture for each reward, and as many pictures of step 0 that have all."""
    samples = folder / "samples"
    samples.mkdir(exist_ok=True)
    lines = []
    for at in (0, step):
        for index, reward in enumerate(rewards):
            file = save_sample(torch.full((3, 8, 8), index / 16), samples / f"{at}-{index:02d}").name
            prompt = prompts[index] if prompts else f"prompt {index}"
            named = {"mine": 9.0 if at == 0 else reward, "watched": 0.5}
            lines.append({"file": file, "prompt": prompt, "seed": index, "step": at, "rewards": named})
    (samples / "manifest.jsonl").write_text(written(lines))
    return folder


def with_trees(folder):
    """Add two trees of iteration 2, and one of iteration 1."""
    TreeFolder(folder).write([tree(prompt="an earlier tree")])
    TreeFolder(folder).write([tree(step=2), tree(step=2, group=1)])
    return folder
