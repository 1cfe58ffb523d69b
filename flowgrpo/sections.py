"""Sections of a configuration that every kind of run has."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from flowgrpo.axes import Strict
from flowgrpo.errors import InputError


class Lora(Strict):
    """Low-rank adapters.

    `targets` are layer names, `auto` for the attention projections, or `all-linear` for all linear layers but the output
    head of a language model.
    """

    rank: int = Field(16, ge=1)
    alpha: float = Field(32, gt=0)
    targets: Literal["auto", "all-linear"] | Annotated[list[str], Field(min_length=1)] = "auto"


class Pick(Strict):
    """Which training prompts an iteration takes, how many samples of each, and what they weigh.

    `by`: `shuffle` takes one pass over all after another; `variance` those whose rewards should differ most (VADE).
    `budget`: `equal` groups, or `knapsack` (Knapsack RL), which moves samples to prompts where they teach more, `least` to
    `most` times a group's size. `robust`, if above 0, leans on the prompts that are solved least (Prompt-GDRO).
    These look at a prompt's mean reward so far, counted from `worst` to `best` as 0 to 1; see `train.memory`.
    """

    by: Literal["shuffle", "variance"] = "shuffle"
    budget: Literal["equal", "knapsack"] = "equal"
    least: float = Field(0.5, gt=0, le=1)
    most: float = Field(2.0, ge=1)
    robust: float = Field(0.0, ge=0)
    worst: float = 0.0
    best: float = 1.0

    @model_validator(mode="after")
    def _ordered(self) -> Pick:
        if self.best <= self.worst:
            raise InputError(f"prompts.pick.best: {self.best} is not above prompts.pick.worst = {self.worst}")
        return self


class Prompts(Strict):
    """Where prompts come from: a built-in name, a .txt file (one per line) or a .jsonl file (`prompt` and any columns)."""

    train: str = "shapes:train"
    eval: str = "shapes:eval"
    pick: Pick = Pick()

    @property
    def load_options(self) -> dict[str, Any]:
        """Further arguments of `flowgrpo.prompts.load`."""
        return {}


class RewardUse(Strict):
    """One reward: what to `use`, its `weight` in the sum, `options` for a class, `name` in the metrics.

    `only` names columns and the value a row must have there for the reward to apply: {task: ocr}. A plain text is a `use`.
    """

    use: str
    weight: float = 1.0
    options: dict[str, Any] = {}
    name: str | None = None
    only: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _use(cls, written: Any) -> Any:
        return {"use": written} if isinstance(written, str) else written


class Optimizer(Strict):
    """AdamW."""

    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(1e-4, ge=0)


class Select(Strict):
    """Train on a `fraction` of what is compared: its `extremes` (best and worst), or the `max_variance` choice (PODS).

    `statistics`: whether means and spreads are those of the `kept` or of `all`.
    """

    rule: Literal["extremes", "max_variance"] = "extremes"
    fraction: float = Field(0.5, gt=0, le=1)
    statistics: Literal["kept", "all"] = "kept"


class Ema(Strict):
    """The average of the weights: moved towards them at `every` so many optimizer steps, by 1 - `decay`."""

    decay: float = Field(0.9, ge=0, lt=1)
    every: int = Field(1, ge=1)


class Schedule(Strict):
    """What the learning rate is multiplied by, over all optimizer steps of the run.

    It rises in a line from 0 over the first `warmup` steps; then it stays (`constant`) or falls to `floor`, in a line
    (`linear`) or as half a wave (`cosine`).
    """

    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = Field(0, ge=0)
    floor: float = Field(0.0, ge=0, lt=1)

    def factor(self, step: int, total: int) -> float:
        """The factor at optimizer step `step`, counted from 0, of `total`: transformers' formulas.

        There too the first step of a warm-up has rate 0.
        """
        if step < self.warmup:
            return step / self.warmup
        done = (step - self.warmup) / max(1, total - self.warmup)
        fallen = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[self.name]
        return self.floor + (1 - self.floor) * fallen


class Train(Strict):
    """The loop's numbers. `updates` splits what an iteration made into disjoint parts, one optimizer step each.

    `split`: into whole `groups`; or shuffled, `samples` (the starts of trees whose trajectories share edges), or trained
    `edges` (those of a state together).

    A plain number for `ema` is its decay, a plain word for `schedule` its name. `memory` is after how many iterations what
    a prompt gave counts half, for `prompts.pick` and the baseline `tracker`. `micro_batch` is rows in one call of the model
    in an update, `rollout_batch` in one that keeps no graph; null is as many.
    """

    iterations: int = Field(20, ge=1)
    groups: int = Field(8, ge=1)
    group_size: int = Field(16, ge=2)
    updates: int = Field(2, ge=1)
    split: Literal["groups", "samples", "edges"] = "groups"
    learning_rate: float = Field(3.0e-4, gt=0)
    schedule: Schedule = Schedule()
    micro_batch: int = Field(32, ge=1)
    rollout_batch: int | None = Field(None, ge=1)
    ema: Ema | None = Ema()
    max_grad_norm: float = Field(1.0, gt=0)
    optimizer: Optimizer = Optimizer()
    memory: float = Field(8.0, gt=0)
    select: Select | None = None

    @property
    def rollout_rows(self) -> int:
        """Rows in one call of the model of a rollout, an evaluation or a decoding."""
        return self.micro_batch if self.rollout_batch is None else self.rollout_batch

    @field_validator("ema", mode="before")
    @classmethod
    def _decay(cls, written: Any) -> Any:
        return {"decay": written} if isinstance(written, int | float) else written

    @field_validator("schedule", mode="before")
    @classmethod
    def _word(cls, written: Any) -> Any:
        return {"name": written} if isinstance(written, str) else written

    @property
    def steps(self) -> int:
        """Optimizer steps of an iteration."""
        return self.updates


class Eval(Strict):
    """Held-out evaluation: `every` so many iterations, on the first `prompts`.

    `save` of the samples are kept as files, for the gallery. Where a reward of `eval_rewards` fell while the trained one
    rose, `watch` evaluations in a row, the run warns.
    """

    every: int = Field(5, ge=1)
    prompts: int = Field(32, ge=1)
    save: int = Field(16, ge=0)
    watch: int = Field(3, ge=1)


class Checkpoint(Strict):
    """A checkpoint `every` so many iterations; the last `keep` stay."""

    every: int = Field(5, ge=1)
    keep: int = Field(2, ge=1)


class Run(Strict):
    """Where and how a run lives.

    After `patience` iterations in a row without anything to learn, no group having an advantage other than 0 or no update
    being possible, it stops; null never does. With rewards that are seldom won a few such iterations come by chance.
    """

    name: str = Field("demo", pattern=r"^[\w-][\w.-]*$")
    dir: str = "runs"
    seed: int = Field(0, ge=0)
    processes: int = Field(1, ge=1)
    trackers: list[str] = []
    resume: bool = False
    patience: int | None = Field(10, ge=1)
    checkpoint: Checkpoint = Checkpoint()

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.dir) / self.name
