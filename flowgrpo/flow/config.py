"""The configuration of a flow model's run, `kind: flow`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from flowgrpo.errors import InputError
from flowgrpo.flow.methods import CHOICES, presets
from flowgrpo.flow.pipeline.attention import AttentionBackend, refuse_lossy_attention
from flowgrpo.schema import choose
from flowgrpo.schema.base import Choice, Strict
from flowgrpo.schema.sections import Eval, Lora, RewardUse, RunConfig, Train
from flowgrpo.training.parts import check_geometry


class Model(Strict):
    """What is trained. `call` is handed to the pipeline as it is; `lora: null` trains every weight.

    `text_encoders` says what becomes of them once the run's prompts are encoded: `keep`, `offload` to host memory, `free`.
    The keys after it are switches of memory and speed; see `flowgrpo.flow.pipeline.switches`.
    """

    path: str
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    lora: Lora | None = Lora()
    call: dict[str, Any] = {}
    text_encoders: Literal["keep", "offload", "free"] = "offload"
    guidance: Literal["pipeline", "none"] = "pipeline"
    gradient_checkpointing: bool = False
    vae: Literal["keep", "offload"] = "keep"
    vae_tiling: bool = False
    attention: AttentionBackend | None = None
    compile: bool = False

    @field_validator("attention", mode="before")
    @classmethod
    def _exact(cls, written: Any) -> Any:
        if isinstance(written, str):
            refuse_lossy_attention(written, "model.attention")
        return written


class Algorithm(Strict):
    """A preset with any of its five axes replaced; see `flowgrpo.flow.methods.presets`."""

    preset: str
    tree: SerializeAsAny[Choice]
    kernel: SerializeAsAny[Choice]
    credit: SerializeAsAny[Choice]
    baseline: SerializeAsAny[Choice]
    objective: SerializeAsAny[Choice]

    @model_validator(mode="before")
    @classmethod
    def _choose(cls, written: Any) -> dict[str, Any]:
        return choose.build_axes(written, presets.PRESETS, CHOICES, "flow_grpo")

    def roots(self, group_size: int) -> int:
        """How many starts a group has."""
        return self.tree.roots(group_size)

    @model_validator(mode="after")
    def _agree(self) -> Algorithm:
        objective, form = self.objective.name, self.kernel.log_prob
        if objective == "normalised_ratio" and form != "mean":
            raise InputError(f"algorithm.kernel.log_prob: normalised_ratio normalises mean, not {form}; take mean")
        if self.objective.step_weights == "noise_aware" and form == "constant_free":
            raise InputError(
                "algorithm.objective.step_weights: noise_aware takes back a 1 / std that constant_free has not; take "
                "equalised, or algorithm.kernel.log_prob=mean"
            )
        return self


class Draft(Strict):
    """Choose the starts of a group's roots by a draft (Sol-RL).

    `pool` times as many are sampled by ODE, with `call` over `model.call`, and the best half and the worst half of what is
    needed go on. Few steps are enough to rank them.
    """

    pool: int = Field(4, ge=2)
    call: dict[str, Any] = {"num_inference_steps": 6}


class FlowTrain(Train):
    """The loop's numbers, and how the starts of a group are chosen."""

    draft: Draft | None = None


class FlowEval(Eval):
    """Held-out evaluation by ODE, with `call` over `model.call`."""

    call: dict[str, Any] = {}


class Config(RunConfig):
    """One run of a flow model."""

    kind: Literal["flow"] = "flow"
    model: Model
    rewards: list[RewardUse] = Field([RewardUse(use="shapes")], min_length=1)
    algorithm: Algorithm = Field(default_factory=lambda: Algorithm.model_validate({}))
    train: FlowTrain = FlowTrain()
    eval: FlowEval = FlowEval()

    @model_validator(mode="after")
    def _geometry(self) -> Config:
        roots = self.algorithm.tree.roots(self.train.group_size)
        check_geometry(self.train, roots, self.run.processes)
        if self.train.draft is not None and self.algorithm.tree.start == "shared":
            raise InputError("train.draft: it chooses the starts of a group, set algorithm.tree.start=independent")
        if self.prompts.pick.budget == "knapsack" and roots == 1:
            raise InputError(
                f"prompts.pick.budget: a group of {self.train.group_size} is one {self.algorithm.tree.name} tree, which "
                "cannot be shared out; take a larger train.group_size, or equal"
            )
        return self
