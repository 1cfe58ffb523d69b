"""Config sections of every kind of run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from flowgrpo.errors import InputError
from flowgrpo.schema.base import Strict
from flowgrpo.schema.engine import Engine
from flowgrpo.schema.saving import Checkpoint, Tracker, Trees
from flowgrpo.schema.schedule import HalfLife, Pick, Schedule, Select
from flowgrpo.schema.wings import AlgorithmSection, Drafted, ModelSection
from rewards.cards import default_name
from rewards.files import frames

AUTO = "auto"  # a number that is probed when the run starts
MOST_ROWS = 2**20  # in one model call
Variant = Annotated[str, Field(pattern=r"^[\w-][\w.-]*$")]


class Prompts(Strict):
    """The sources of prompts, and their choice in each iteration."""

    train: str = "shapes:train"
    """Trained on: a built-in set, a corpus (pickapic:train), a .txt file (one prompt a line), a table (.jsonl, .json, .csv,
    .tsv or .parquet: prompt and any further columns) or a dataset of the hub (hub:owner/name:split)."""
    eval: str = "shapes:eval"
    """Held out for evaluation; the same kinds of source."""
    column: str = Field("prompt", min_length=1)
    """Column with the prompt, in tables and in datasets of the hub."""
    folder: str = "data"
    """Folder with copies of corpora."""
    pick: Pick = Pick()
    """How an iteration chooses its prompts, their numbers of samples and their weights."""

    @property
    def load_options(self) -> dict[str, Any]:
        """Return the keyword arguments of `flowgrpo.data.prompts.load` that this section sets."""
        return {"column": self.column, "folder": self.folder}


class RewardUse(Strict):
    """One reward. A string in its place sets `use`."""

    use: str
    """A built-in name, pkg.module:object, ./file.py:object (./file.py if it has one reward), an installed entry point, or
    a URL."""
    weight: float = 1.0
    """Weight in the sum of rewards that is trained on; scale of the reward if combine is worst or cautious."""
    offset: float = 0.0
    """The reward that counts as 0: several rewards are combined as weight x (reward - offset)."""
    options: dict[str, Any] = {}
    """Arguments of the reward's class, or of the client of a URL."""
    name: str | None = None
    """Name in the metrics; null: the last part of use."""
    only: dict[str, Any] = {}
    """Columns with the value that a row needs for the reward to apply: {task: ocr}."""
    frames: str | int | None = None
    """Scores frames of a video as pictures and takes their mean: first, middle, all, every N, or a number of evenly spaced
    ones; null: the reward sees the whole video."""
    of: Literal["soundtrack"] | None = None
    """soundtrack: scores the sound of videos that have one; null: scores the pictures."""

    @field_validator("frames")
    @classmethod
    def _frames(cls, rule: str | int | None) -> str | int | None:
        if rule is not None:
            frames.choose(rule, 1)
        return rule

    @model_validator(mode="before")
    @classmethod
    def _use(cls, written: Any) -> Any:
        return {"use": written} if isinstance(written, str) else written


class Optimizer(Strict):
    """The AdamW implementation and its parameters, except the learning rate. A string in its place sets `name`."""

    name: Literal["adamw", "adamw8bit"] = "adamw"
    """adamw: PyTorch's, moments in float32; adamw8bit: bitsandbytes', in 8 bits (flowgrpo[8bit])."""
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    """Decays of the first and the second moment."""
    eps: float = Field(1e-8, gt=0, le=1e30)
    """Added to the square root of the second moment."""
    weight_decay: float = Field(1e-4, ge=0, le=1e6)
    """Decoupled weight decay."""


class Ema(Strict):
    """The average of the weights, which evaluation, gallery and export use."""

    decay: float = Field(0.9, ge=0, lt=1)
    """Each move is avg <- decay avg + (1 - decay) weights; warmup limits the decay of the first steps."""
    warmup: float = Field(40.0, gt=1)
    """The decay at optimizer step t is at most (1 + t) / (warmup + t), so that the average lags by about t / warmup steps;
    Flow-GRPO's code has 10."""
    every: int = Field(1, ge=1)
    """Optimizer steps between two moves of the average."""

    def decay_at(self, step: int) -> float:
        """Return the decay for optimizer step `step`, counted from 0; 1 if the average does not move at that step."""
        return 1.0 if (step + 1) % self.every else min((1 + step) / (self.warmup + step), self.decay)


class Train(Strict):
    """Sizes and hyperparameters of the training loop."""

    iterations: int = Field(20, ge=1)
    """Iterations of the run: a rollout and its update each."""
    groups: int = Field(8, ge=1)
    """Groups of an iteration on all processes, of one prompt each."""
    group_size: int = Field(16, ge=2)
    """Trained trajectories of a group (samples, completions); of branch trees the leaves."""
    updates: int = Field(2, ge=1)
    """Optimizer steps of an iteration, each on its own part of the rollout."""
    split: Literal["groups", "samples", "edges"] = "groups"
    """Unit of these parts: whole groups; shuffled samples, each with all that grew from its start; shuffled trained
    edges."""
    learning_rate: float = Field(3.0e-4, gt=0, le=1e30)
    """Learning rate, before the schedule's factor."""
    schedule: Schedule = Schedule()
    """Schedule of the learning rate; a word is its name."""
    micro_batch: int | Literal["auto"] = 32
    """Samples in one model call of an update; auto: the run finds the number at its start and keeps it."""
    rollout_batch: int | Literal["auto"] | None = None
    """Samples in one model call of a rollout, an evaluation or a decoding; null: micro_batch; auto: found."""
    ema: Ema | None = Ema()
    """The average of the weights; a number is its decay, null keeps none."""
    max_grad_norm: float = Field(1.0, gt=0)
    """The gradient is clipped to this norm."""
    optimizer: Optimizer = Optimizer()
    """The AdamW implementation and its parameters; a word is its name."""
    half_life: HalfLife = HalfLife()
    """Age at which a reward counts half in the statistics of prompts (prompts.pick, baselines tracker and cumulative)
    and of steps (tree adaptive); a number is in iterations."""
    select: Select | None = None
    """Train on a part of the units that are compared; null: on all."""
    if TYPE_CHECKING:  # flow models only
        draft: Drafted | None = None
        replay: str = "auto"

    def done_at(self, iteration: int) -> float:
        """Return which fraction of the run is done in `iteration`, counted from 0: 0 in the first, 1 in the last."""
        return iteration / max(1, self.iterations - 1)

    @property
    def found(self) -> tuple[str, ...]:
        """Return the batch size keys that are `auto`: the run finds their numbers by probing at its start."""
        return tuple(key for key in ("micro_batch", "rollout_batch") if getattr(self, key) == AUTO)

    @property
    def most_rows(self) -> int:
        """Return the largest batch to probe: the largest power of two not above `part_rows`."""
        return 1 << max(1, self.part_rows).bit_length() - 1

    @property
    def part_rows(self) -> int:
        """Return the number of trajectories, over all processes, whose samples or edges one optimizer step trains on."""
        return self.groups * self.group_size // (1 if self.split == "edges" else self.updates)

    @property
    def update_rows(self) -> int:
        """Return the rows per model call in an update; `most_rows` while `micro_batch` is still `auto`."""
        return self.most_rows if isinstance(self.micro_batch, str) else self.micro_batch

    @property
    def rollout_rows(self) -> int:
        """Return the rows per model call without gradients; `most_rows` while the size is still `auto`."""
        rows = self.update_rows if self.rollout_batch is None else self.rollout_batch
        return self.most_rows if isinstance(rows, str) else rows

    @field_validator("micro_batch", "rollout_batch", mode="before")
    @classmethod
    def _rows(cls, written: Any, info: ValidationInfo) -> Any:
        null = written is None and info.field_name == "rollout_batch"
        whole = isinstance(written, int) and not isinstance(written, bool)
        if null or written == AUTO or (whole and 0 < written <= MOST_ROWS):
            return written
        number = (isinstance(written, float) and math.isfinite(written)) or whole
        nearest = min(max(1, round(written)), MOST_ROWS) if number else AUTO if isinstance(written, str | float) else 1
        allowed = f"a whole number from 1 to {MOST_ROWS:,}"
        raise InputError(f"train.{info.field_name}: {written!r} is neither {allowed} nor auto, take {nearest}")

    @field_validator("ema", "half_life", mode="before")
    @classmethod
    def _number(cls, written: Any, info: ValidationInfo) -> Any:
        key = {"ema": "decay", "half_life": "after"}[info.field_name or ""]
        return {key: written} if isinstance(written, int | float) else written

    @field_validator("schedule", "optimizer", mode="before")
    @classmethod
    def _word(cls, written: Any) -> Any:
        return {"name": written} if isinstance(written, str) else written

    @property
    def steps(self) -> int:
        """Return the optimizer steps per iteration."""
        return self.updates


class Eval(Strict):
    """Options of the held-out evaluation."""

    every: int = Field(5, ge=1)
    """Iterations between two evaluations; there is one before the first and after the last iteration, too."""
    prompts: int = Field(32, ge=1)
    """Number of held-out prompts that are sampled, from the first on; prompt i always has seed i."""
    save: int = Field(16, ge=0)
    """Number of these samples that are kept as files for the gallery."""
    watch: int = Field(3, ge=1)
    """Warn after this many evaluations in a row in which an eval reward fell and the trained one rose."""


class Run(Strict):
    """The run's folder, seed, processes and checkpoints."""

    name: str = Field("demo", pattern=r"^[\w-][\w.-]*$")
    """Name of the run's folder."""
    dir: str = "runs"
    """Parent of the run's folder."""
    seed: int = Field(0, ge=0, le=2**32 - 1)
    """Seed of all random numbers of the run."""
    processes: int = Field(1, ge=1)
    """Processes that the command starts; or use accelerate launch -m flowgrpo."""
    sharding: Literal["none", "fsdp2", "hsdp"] = "none"
    """Sharding of the networks, and without a LoRA of all that is trained. none: whole on each process; fsdp2: each
    process holds a part; hsdp: each process of a machine holds a part, and each machine the whole."""
    context_parallel: int = Field(1, ge=1)
    """Processes that share each call of a flow model's network, each with a part of the sequence, for videos too long
    for one GPU; run.processes must be a multiple of it."""
    generators: int = Field(0, ge=0)
    """Number of run.processes that only roll out, for those that train; with staleness they work ahead."""
    evaluators: int = Field(0, ge=0)
    """Number of run.processes that only evaluate, while the others go on."""
    staleness: int = Field(0, ge=0, le=64)
    """Age, in iterations, of the weights that roll out; above 0 generators can work ahead."""
    engine: Engine | None = None
    """A server that rolls out: chains of a flow model (SGLang-Diffusion), or texts with step maps; null: this program
    does."""
    trackers: dict[str, Tracker] = {}
    """Trackers of accelerate that get metrics and pictures: [tensorboard, wandb], or a map with options of each."""
    resume: Literal[False, True, "auto"] = False
    """Continue the run in the folder. false: no; true: yes; auto: yes if there is one, otherwise begin one."""
    patience: int | None = Field(10, ge=1)
    """Stop with status 1 after this many iterations in a row without an advantage or an update; a shorter run that had
    none at all ends with status 1, too. null: neither."""
    checkpoint: Checkpoint = Checkpoint()
    """When the run's state is written, and how much of it is kept."""
    trees: Trees | None = None
    """Rollout trees to keep, with a picture of every state, for trees.html; null: none."""

    @field_validator("trackers", mode="before")
    @classmethod
    def _names(cls, written: Any) -> Any:
        """Convert a name, or a list of names or of maps from a name to options, to one map."""
        if not isinstance(written, list | str):
            return written
        listed = [written] if isinstance(written, str) else written
        maps = [item if isinstance(item, dict) else {str(item): {}} for item in listed]
        return {name: options for each in maps for name, options in each.items()}

    @property
    def folder(self) -> Path:
        """Return the run's folder."""
        return Path(self.dir) / self.name

    @property
    def shards(self) -> int:
        """Return the number of data shards: one for each training process, or for each context-parallel group of them."""
        return max(1, self.trainers(self.processes) // self.context_parallel)

    def trainers(self, processes: int) -> int:
        """Return how many of `processes` train; the others are generators and evaluators."""
        return processes - self.generators - self.evaluators


class RunConfig(Strict):
    """The configuration of a run. The subclass of each kind of model narrows the types of the sections."""

    kind: str
    """flow: images, videos and sounds; mdlm: texts."""
    model: ModelSection
    """What is trained."""
    prompts: Prompts = Prompts()
    """Where prompts come from."""
    rewards: list[RewardUse] = Field(min_length=1)
    """Rewards to train on, combined by algorithm.baseline.combine; a single one needs no list."""
    eval_rewards: list[RewardUse] = []
    """Rewards that only evaluations measure; the same keys."""
    algorithm: AlgorithmSection
    """A preset with any word or number of its axes replaced."""
    train: Train = Train()
    """Sizes and numbers of the training loop."""
    eval: Eval = Eval()
    """Held-out evaluation."""
    run: Run = Run()
    """The run's folder, seed, processes and checkpoints."""

    @property
    def reward_names(self) -> list[str]:
        """Return the names of the rewards that are trained on."""
        return [use.name or default_name(use.use) for use in self.rewards]

    @property
    def stored_groups(self) -> str | None:
        """Return the folder of stored groups; None if the run samples."""
        return None

    @property
    def keeps_graphs(self) -> bool:
        """Return whether rollouts may keep their autograd graphs for the update."""
        return False

    @property
    def exchanges_base(self) -> bool:
        """Return whether another model sometimes replaces the frozen base. Such a base must not be quantised."""
        return False

    @field_validator("rewards", "eval_rewards", mode="before")
    @classmethod
    def _as_list(cls, written: Any) -> Any:
        return [written] if isinstance(written, str | dict) else written

    @model_validator(mode="after")
    def _compares(self) -> RunConfig:
        baseline, objective, select = self.algorithm.baseline, self.algorithm.objective.name, self.train.select
        if objective in ("contrast", "regression") and baseline.name == "best" and baseline.drop_zero:
            raise InputError(
                f"algorithm.baseline: best keeps one sample, but {objective} needs several; take group_mean"
            )
        if objective == "contrast" and baseline.name == "none":
            raise InputError(
                "algorithm.baseline: with none, all samples with a positive reward are good, but contrast needs "
                "bad ones; take group_mean or absolute"
            )
        if select is not None and select.compares_kept and baseline.name in ("cumulative", "quantile"):
            raise InputError(f"train.select.statistics: {baseline.name} remembers all rewards, take all")
        if (
            select is not None
            and select.across == "batch"
            and self.algorithm.objective.couples not in ("nothing", False)
        ):
            raise InputError(f"train.select.across: {objective} compares the samples of a group, take sets")
        self.train.half_life.check(self.algorithm.ratio_hindrance, self.train.steps > 1 or self.run.staleness > 0)
        return self

    @model_validator(mode="after")
    def _members(self) -> RunConfig:
        combine, way_out = self.algorithm.baseline.combine, "move it to eval_rewards"
        if self.rewards and all(use.weight == 0 for use in self.rewards):
            raise InputError("rewards.0.weight: all weights are 0, so nothing is trained; set one to 1")
        for place, use in enumerate(self.rewards):
            if combine in ("worst", "cautious") and use.weight == 0:
                counted = f"0 makes it 0 for every sample, which {combine} counts as any other"
                raise InputError(f"rewards.{place}.weight: {counted}; {way_out}")
        return self
