"""What is soaked: very small runs of both kinds, in one process and in two, whole and in shards."""

from dataclasses import dataclass
from pathlib import Path

import tiny

ENDS = (
    "train: {iterations: 4, groups: 2, group_size: 4, updates: 1, learning_rate: 1.0e-3, micro_batch: 4, ema: 0.9}\n"
    "eval: {every: 2, prompts: 2, save: 1}\n"
    "run: {patience: null, checkpoint: {every: 1, keep: 3}}\n"
)
FLOW = "algorithm: {preset: flow_grpo}\n" + ENDS
CONFIGS = {
    "tiny": "model: {path: tiny, lora: null, call: {num_inference_steps: 4, guidance_scale: 1.0, height: 16, width: 16,"
    " max_sequence_length: 1}}\n"
    "prompts: {train: prompts.txt, eval: prompts.txt}\nrewards: [{use: './mine.py:whim'}]\n" + FLOW,
    "shapes": "model: {path: shapes, lora: null, call: {num_inference_steps: 4}}\n"
    "prompts: {train: 'shapes:train', eval: 'shapes:eval'}\nrewards: [{use: shapes}]\n" + FLOW,
    "text": "kind: mdlm\nmodel: {path: digits, lora: null}\nalgorithm: {preset: diffu_grpo}\n"
    "prompts: {train: 'countdown:train', eval: 'countdown:eval'}\nrewards: [{use: solved}]\n" + ENDS,
}
# A reward that draws from global generators, so that a resume which does not put them back shows.
WHIM = """
import random
import numpy
def whim(images, prompts):
    return images[:, 0].mean((1, 2)) + 0.1 * (numpy.random.rand(len(prompts)) + random.random())
"""
PROMPTS = "a red circle\ntwo blue square\na green circle\na blue circle\n"


@dataclass(frozen=True)
class Subject:
    """A run: its config by name, its preset, and further words of its command line."""

    config: str
    preset: str
    words: tuple[str, ...] = ()
    processes: int = 1
    sharding: str = "none"

    @property
    def name(self) -> str:
        lora = ", LoRA" if LORA in self.words else ""
        return f"{self.config}, {self.preset}{lora}, {self.processes} x {self.sharding}"

    @property
    def arguments(self) -> list[str]:
        own = [f"algorithm.preset={self.preset}", f"run.processes={self.processes}", f"run.sharding={self.sharding}"]
        return [f"{self.config}.yaml", *own, *self.words]


LORA = "model.lora={rank: 4, alpha: 8}"
TWO_CHILDREN = ("algorithm.tree.branches=2",)
SUBJECTS = (
    Subject("tiny", "flow_grpo"),
    Subject("tiny", "flow_grpo", (LORA, "train.groups=4", "train.updates=2"), processes=2, sharding="fsdp2"),
    Subject("text", "diffu_grpo", (LORA,)),
    Subject("tiny", "branch_grpo", ("run.checkpoint.every=2",)),
    Subject("text", "coupled_grpo", processes=2),
    Subject("tiny", "tempflow_fast", TWO_CHILDREN, processes=2, sharding="fsdp2"),
    Subject("shapes", "tempflow_fast", TWO_CHILDREN),
    Subject("tiny", "branch_grpo", (LORA, "train.ema=null"), processes=2),
    Subject("text", "coupled_grpo", (LORA, "train.updates=2")),
    Subject("tiny", "vgpo", ("algorithm.tree.root=true", "algorithm.kernel.calibrate={rounds: 1}")),
    Subject("text", "diffu_grpo", processes=2, sharding="fsdp2"),
    Subject("tiny", "flow_grpo", ("run.checkpoint.keep=1",), processes=2),
    Subject("text", "diffu_grpo", (LORA, "run.generators=1", "run.staleness=1"), processes=2),
    Subject("text", "coupled_grpo", (LORA, "run.evaluators=1"), processes=2),
    Subject("tiny", "nft", (LORA, "train.updates=2")),
    Subject("tiny", "dpo", (LORA, "algorithm.objective.kl.refresh=2"), processes=2),
)


def furnish(folder: Path) -> None:
    """Put the configs of all subjects, and what they name, into an empty folder."""
    for name, text in CONFIGS.items():
        (folder / f"{name}.yaml").write_text(text)
    (folder / "mine.py").write_text(WHIM)
    (folder / "prompts.txt").write_text(PROMPTS)
    tiny.sd3().save_pretrained(folder / "tiny")
