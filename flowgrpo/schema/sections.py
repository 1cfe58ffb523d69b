"""Sections of a configuration that every kind of run has."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from flowgrpo.errors import InputError
from flowgrpo.schema.base import Strict


class Lora(Strict):
    """Low-rank adapters."""

    rank: int = Field(16, ge=1)
    """Rank of each adapter."""
    alpha: float = Field(32, gt=0)
    """An adapter's output is multiplied by alpha / rank."""
    targets: Literal["auto", "all-linear"] | Annotated[list[str], Field(min_length=1)] = "auto"
    """Layer names, auto (the attention projections) or all-linear (all linear layers but a language model's head)."""


class Pick(Strict):
    """Which training prompts an iteration takes, how many samples of each, and what they weigh.

    These look at a prompt's mean reward so far, counted from `worst` to `best` as 0 to 1; see `train.half_life`.
    """

    by: Literal["shuffle", "variance"] = "shuffle"
    """shuffle: one pass over all prompts after another; variance: those whose rewards should differ most (VADE)."""
    budget: Literal["equal", "knapsack"] = "equal"
    """equal groups, or knapsack (Knapsack RL): samples move to prompts where they teach more."""
    least: float = Field(0.5, gt=0, le=1)
    """Smallest group of the knapsack, times a group's size."""
    most: float = Field(2.0, ge=1)
    """Largest group of the knapsack, times a group's size."""
    robust: float = Field(0.0, ge=0)
    """Above 0, groups weigh softmax(robust x (1 - p)): the prompts that are solved least count more (Prompt-GDRO)."""
    worst: float = 0.0
    """The reward that counts as 0."""
    best: float = 1.0
    """The reward that counts as 1."""

    @model_validator(mode="after")
    def _ordered(self) -> Pick:
        if self.best <= self.worst:
            raise InputError(f"prompts.pick.best: {self.best} is not above prompts.pick.worst = {self.worst}")
        return self


class Prompts(Strict):
    """Where prompts come from."""

    train: str = "shapes:train"
    """Trained on: a built-in set, a .txt file (one prompt a line) or a .jsonl file (prompt and any further columns)."""
    eval: str = "shapes:eval"
    """Held out; likewise."""
    pick: Pick = Pick()
    """Which training prompts an iteration takes."""

    @property
    def load_options(self) -> dict[str, Any]:
        """Further arguments of `flowgrpo.data.prompts.load`."""
        return {}


class RewardUse(Strict):
    """One reward. A plain text is a `use`."""

    use: str
    """A built-in name, pkg.module:object, ./file.py:object, an installed entry point, or a URL."""
    weight: float = 1.0
    """What is trained on is the sum of weight x reward."""
    options: dict[str, Any] = {}
    """Arguments of a class."""
    name: str | None = None
    """In the metrics; null: the object's own."""
    only: dict[str, Any] = {}
    """Columns, and the value a row must have there for the reward to apply: {task: ocr}."""

    @model_validator(mode="before")
    @classmethod
    def _use(cls, written: Any) -> Any:
        return {"use": written} if isinstance(written, str) else written


class Optimizer(Strict):
    """AdamW."""

    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    """Decays of the first and the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(1e-4, ge=0)
    """Decoupled weight decay."""


class Select(Strict):
    """Train on a part of what is compared."""

    rule: Literal["extremes", "max_variance"] = "extremes"
    """extremes: the best and the worst; max_variance: the choice of the largest variance (PODS)."""
    fraction: float = Field(0.5, gt=0, le=1)
    """How much is trained on."""
    statistics: Literal["kept", "all"] = "kept"
    """Whether means and spreads are those of the kept or of all."""


class Ema(Strict):
    """The average of the weights, which evaluation, gallery and export use."""

    decay: float = Field(0.9, ge=0, lt=1)
    """The average moves towards the weights by 1 - decay; by more in the first steps."""
    every: int = Field(1, ge=1)
    """Optimizer steps between two moves."""


class Schedule(Strict):
    """What the learning rate is multiplied by, over all optimizer steps of the run."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up the factor stays, falls in a line, or falls as half a wave."""
    warmup: int = Field(0, ge=0)
    """Optimizer steps over which the factor rises in a line from 0."""
    floor: float = Field(0.0, ge=0, lt=1)
    """The factor at the end of the run."""

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
    """The loop's numbers."""

    iterations: int = Field(20, ge=1)
    """Rollouts, each followed by its update."""
    groups: int = Field(8, ge=1)
    """Prompts of an iteration, over all processes."""
    group_size: int = Field(16, ge=2)
    """Samples of a prompt that are trained on; of trees their leaves."""
    updates: int = Field(2, ge=1)
    """Disjoint parts of what an iteration made, one optimizer step each."""
    split: Literal["groups", "samples", "edges"] = "groups"
    """Into whole groups, or shuffled: samples (the starts of trees) or trained edges (those of a state together)."""
    learning_rate: float = Field(3.0e-4, gt=0)
    """AdamW's, at its highest."""
    schedule: Schedule = Schedule()
    """Of the learning rate; a word is its name."""
    micro_batch: int = Field(32, ge=1)
    """Rows in one call of the model in an update."""
    rollout_batch: int | None = Field(None, ge=1)
    """Rows in one call of a rollout, an evaluation or a decoding, which keep no graph; null: micro_batch."""
    ema: Ema | None = Ema()
    """The average of the weights; a number is its decay, null keeps none."""
    max_grad_norm: float = Field(1.0, gt=0)
    """The gradient's norm is cut to it."""
    optimizer: Optimizer = Optimizer()
    """AdamW's further numbers."""
    half_life: float = Field(8.0, gt=0)
    """Iterations after which what a prompt gave counts half, for prompts.pick and the baseline tracker."""
    select: Select | None = None
    """Train on a part of what is compared; null: on all."""

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
    """Held-out evaluation."""

    every: int = Field(5, ge=1)
    """Iterations between two; also before the first and after the last."""
    prompts: int = Field(32, ge=1)
    """The first so many held-out prompts, prompt i always from seed i."""
    save: int = Field(16, ge=0)
    """Of these, kept as files for the gallery."""
    watch: int = Field(3, ge=1)
    """Evaluations in a row in which an eval reward fell while the trained one rose, until a warning."""


class Checkpoint(Strict):
    """Checkpoints."""

    every: int = Field(5, ge=1)
    """Iterations between two; also after the last."""
    keep: int = Field(2, ge=1)
    """The last so many stay."""


class Run(Strict):
    """Where and how a run lives."""

    name: str = Field("demo", pattern=r"^[\w-][\w.-]*$")
    """Of its folder."""
    dir: str = "runs"
    """Where that folder is."""
    seed: int = Field(0, ge=0)
    """Of every random number."""
    processes: int = Field(1, ge=1)
    """Started by the command; or use accelerate launch -m flowgrpo."""
    trackers: list[str] = []
    """accelerate's: tensorboard, wandb, ..."""
    resume: bool = False
    """Go on with the run that is in the folder."""
    patience: int | None = Field(10, ge=1)
    """Iterations in a row without anything to learn, after which the run stops; null: never."""
    checkpoint: Checkpoint = Checkpoint()
    """When the run's state is written."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.dir) / self.name


class RunConfig(Strict):
    """One run of any kind; a kind says more exactly what its sections are."""

    kind: str
    """flow: images, videos and sounds; mdlm: texts."""
    model: Strict
    """What is trained."""
    prompts: Prompts = Prompts()
    """Where prompts come from."""
    rewards: list[RewardUse] = Field(min_length=1)
    """Trained on: the sum of weight x reward."""
    eval_rewards: list[RewardUse] = []
    """Watched only; same keys."""
    algorithm: Strict
    """A preset with any word or number of its axes replaced."""
    train: Train = Train()
    """The loop's numbers."""
    eval: Eval = Eval()
    """Held-out evaluation."""
    run: Run = Run()
    """Where and how the run lives."""
