"""Predict the seconds of runs that others have published; prints the table of docs/research/scale.md.

    HF_HUB_OFFLINE=1 python research/plan_cost.py

The runs train Qwen-Image with Flow-GRPO on 512 pictures of 512 pixels: 32 groups of 16, 10 steps of which 2 are
trained, two optimizer steps, 16 rows in a call with gradient. They are from two pages of verl-project/verl-omni:
docs/algo/performance.md of 10 September 2026 and docs/start/rollout_batching.md of 29 July 2026. The seconds of
generation are from the second page, which names no GPUs; we assume those of the first. The runs differ from ours, and
the prediction accounts for that:

 1. Their pictures come from an engine that holds the whole model on each GPU: no call of a rollout gathers.
 2. They compute the log-probabilities of the rollout again before the update: one more forward pass of each trained step.
 3. A language model of 8 billion weights judges each picture. It is in the fixed part: a line through the seconds of the two
    runs that train all weights, over 1 / GPUs, ends at 95 s.
 4. The pages do not give the length of their texts; we assume 256 tokens for prompts and negative prompts, the largest of
    their recipe. They do not say how 64 GPUs hold the weights, or whether activations are checkpointed; we assume shards
    over all GPUs, and checkpointing.

Nothing is downloaded; a minute of one core.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from flowgrpo import config
from flowgrpo.commands.model_kinds import KINDS
from flowgrpo.training.planning.gpu_scaling import Prices
from flowgrpo.training.planning.iteration_cost import Cost, Work

FIXED = 95.0
TEXT = "word " * 400  # cut to the longest prompt
RECIPE = [
    "train.groups=32",
    "train.group_size=16",
    "train.updates=2",
    "train.micro_batch=16",
    "model.call.num_inference_steps=10",
    "model.call.max_sequence_length=256",
    "algorithm.tree.size=2",
    "run.sharding=fsdp2",
]
LORA = [
    "model.lora.targets=[to_q, to_k, to_v, to_out.0, add_q_proj, add_k_proj, add_v_proj, to_add_out, img_mlp.net.0.proj, "
    "img_mlp.net.2, txt_mlp.net.0.proj, txt_mlp.net.2]",
    f"model.call.negative_prompt={TEXT}",
]
ALL = ["model.lora=null", "model.call.true_cfg_scale=1.0", "model.call.negative_prompt=null"]


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published run and its seconds.

    Attributes:
        name: description in the table.
        gpus, gpu_type: the GPUs that it ran on.
        overrides: settings besides `RECIPE`.
        seconds: published seconds of an iteration, or of a part of it.
        part: part of the iteration; None for all of it.
    """

    name: str
    gpus: int
    gpu_type: str
    overrides: list[str]
    seconds: float
    part: str | None = None


RUNS = (
    Published(
        name="LoRA, guided: generation, 32 pictures in a call",
        gpus=4,
        gpu_type="h800",
        overrides=[*LORA, "train.rollout_batch=32"],
        seconds=108,
        part="rollout",
    ),
    Published(
        name="LoRA, guided: generation, one in a call",
        gpus=4,
        gpu_type="h800",
        overrides=[*LORA, "train.rollout_batch=1"],
        seconds=226,
        part="rollout",
    ),
    Published(name="LoRA, guided", gpus=4, gpu_type="h800", overrides=LORA, seconds=420),
    Published(name="all weights, unguided", gpus=4, gpu_type="h200", overrides=ALL, seconds=250),
    Published(name="all weights, unguided", gpus=64, gpu_type="h100", overrides=ALL, seconds=105),
)


def as_theirs(work: Work) -> Work:
    """Return the work of an iteration, changed as in points 1 and 2 above, and without evaluation."""
    learning, other = work.calls["update"]
    rollout = [replace(each, gathers=0) for each in work.calls["rollout"]]
    again = replace(other, sweeps=other.sweeps + learning.sweeps)
    return replace(work, calls={**work.calls, "rollout": rollout, "update": [learning, again], "evaluate": []})


def predicted(run: Published, prompts: Path) -> Cost:
    """Return the predicted cost of a run's iteration.

    Args:
        prompts: a file of prompts.
    """
    settings = config.load("qwen-image", [*RECIPE, f"prompts.train={prompts}", *run.overrides])
    kind = KINDS[settings.kind]
    with kind.budget.budget_of(settings) as budget:
        work = as_theirs(kind.cost.work(budget, kind.plan.plan(settings)))
        return Prices(gpu_type=run.gpu_type, fixed=FIXED).cost(budget.on_processes(run.gpus), work)


def row(run: Published, cost: Cost) -> str:
    """Return a run's row of the table."""
    found = cost.total if run.part is None else cost.seconds[run.part]
    parts = {part: seconds for part, seconds in cost.seconds.items() if run.part in (None, part)}
    told = ", ".join(f"{part} {seconds:.0f}" for part, seconds in parts.items() if seconds >= 0.5)
    cells = (run.name, f"{run.gpus} {run.gpu_type.upper()}", f"{run.seconds:.0f}", f"{found:.0f}")
    return f"| {' | '.join((*cells, f'{found / run.seconds - 1:+.0%}', told))} |"


def main() -> int:
    """Print the table."""
    heads = ("run", "GPUs", "published", "predicted", "error", "of which")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder, "prompts.txt")
        prompts.write_text(f"{TEXT}\n")
        for run in RUNS:
            print(row(run, predicted(run, prompts)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
