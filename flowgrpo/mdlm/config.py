"""The configuration of a run of a masked-diffusion language model, `kind: mdlm`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, SerializeAsAny, model_validator
from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.network.block_attention import Attention
from flowgrpo.mdlm.methods import CHOICES
from flowgrpo.mdlm.methods.decoder_options import Decoding, Rollouts
from flowgrpo.mdlm.methods.likelihoods.likelihood import Likelihood
from flowgrpo.mdlm.methods.objectives.aggregation import Aggregation
from flowgrpo.mdlm.methods.objectives.objective import Objective, Ratio
from flowgrpo.mdlm.methods.objectives.path_objectives import ORDERED, PrefixRatio
from flowgrpo.mdlm.methods.presets import PRESETS
from flowgrpo.mdlm.methods.schedules.schedule import Schedule
from flowgrpo.schema import preset_overrides
from flowgrpo.schema.base import Choice
from flowgrpo.schema.lora import Lora, LoraPath, Quantised, check_base
from flowgrpo.schema.sections import Eval, Prompts, RewardUse, RunConfig, Train, Variant
from flowgrpo.schema.wings import AlgorithmSection, ModelSection
from flowgrpo.training.advantages.baseline import Baseline
from flowgrpo.training.advantages.failed_groups import check_success
from flowgrpo.training.distributed import worker_roles
from flowgrpo.training.distributed.minibatches import check_geometry
from rewards.base import nearest

if TYPE_CHECKING:
    from flowgrpo.mdlm.methods.hints import Inpainting, NoHints
    from flowgrpo.mdlm.methods.schedules.schedule import LearnedSchedule, Unscheduled

    AnySchedule = Unscheduled | LearnedSchedule  # `name` decides which
    AnyHints = NoHints | Inpainting
else:
    AnySchedule, AnyHints = Schedule, Choice

DIGITS = "digits"
LONGEST = 1 << 17  # tokens of an answer; a decoder lists its blocks
DIGITS_LENGTH = 20  # tokens of an answer of `digits`, which was trained on answers of this length


class TextModel(ModelSection):
    """What is trained."""

    path: str
    """Built-in name, local folder or hub id of a masked-diffusion language model; required."""
    variant: Variant | None = None
    """Word in the names of the weight files to read, fp16 for example; null: files without such a word."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the frozen weights and of the computation; trained weights are kept in float32."""
    lora: Lora | None = Lora()
    """Low-rank adapters; null trains every weight."""
    merge: LoraPath | None = None
    """A LoRA, as lora.path takes it, to merge into the weights before all of these are trained (lora: null); null: none."""
    quantise: Quantised | None = None
    """Keep the linear layers of the frozen base's blocks in int8 or nf4; needs adapters. null: as the files have them."""
    length: int = Field(256, ge=1, le=LONGEST)
    """Tokens of an answer, end tokens that fill it up included; 20 for the embedded model."""
    chat: bool = False
    """Put prompts into the tokenizer's chat template, as the user's turn."""
    trust_remote_code: bool = False
    """Let code run that comes with the model."""
    mask_id: int | None = None
    """Id of the mask token; null: the one that the model or its tokenizer names."""
    shift: bool | None = None
    """Whether output i predicts token i + 1; null: the known value of the model's type, else false."""
    attention: Attention | None = None
    """block: a position sees no later block; full: it sees all. null: block for LLaDA2, SDAR and Fast-dLLM v2, else full."""
    block_size: int | None = Field(None, ge=2)
    """Tokens of a block; null: the known size of the model's type."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, the same numbers."""
    offload_activations: bool = False
    """Keep activations in host memory until the backward pass: less memory of the GPU, two transfers, the same numbers."""

    @model_validator(mode="before")
    @classmethod
    def _own_length(cls, written: Any) -> Any:
        if isinstance(written, dict) and written.get("path") == DIGITS:
            return {"length": DIGITS_LENGTH, **written}
        return written

    @model_validator(mode="after")
    def _frozen(self) -> TextModel:
        check_base(self.lora, self.quantise, self.merge)
        return self


class TextPrompts(Prompts):
    """Where prompts come from; by default the embedded model's tasks."""

    train: str = "tasks:train"
    """Prompts for training: a built-in set, a corpus (gsm8k:train, math:train), a .txt file, a table (.jsonl, .json, .csv,
    .tsv or .parquet), or a dataset of the hub (hub:owner/name:split)."""
    eval: str = "tasks:eval"
    """Held-out prompts; the same kinds of source."""
    template: Literal["d1", "boxed", "d1_boxed"] | None = None
    """Words put around each question, which ask for the answer in the format of a reward; null: none."""

    @property
    @override
    def load_options(self) -> dict[str, Any]:
        return {**super().load_options, "template": self.template}


class TextAlgorithm(AlgorithmSection):
    """A preset with any of its axes replaced; see `flowgrpo.mdlm.methods`."""

    preset: str
    """A row of the table of methods."""
    decoder: SerializeAsAny[Rollouts]
    """How are answers made?"""
    schedule: SerializeAsAny[AnySchedule]
    """Are the decoder's numbers actions too?"""
    hints: SerializeAsAny[AnyHints]
    """What helps a group that fails?"""
    likelihood: SerializeAsAny[Likelihood]
    """From which masked views is log p estimated?"""
    baseline: SerializeAsAny[Baseline]
    """Compared with what?"""
    objective: SerializeAsAny[Objective]
    """How does the policy move?"""
    aggregation: SerializeAsAny[Aggregation]
    """What does a token weigh?"""

    @model_validator(mode="before")
    @classmethod
    def _choose(cls, written: Any) -> dict[str, Any]:
        return preset_overrides.build_axes(written, PRESETS, CHOICES, "diffu_grpo")

    @model_validator(mode="after")
    def _agree(self) -> TextAlgorithm:
        if self.schedule.name == "learned" and self.decoder.name != "scheduled":
            raise InputError("algorithm.schedule: learned numbers need algorithm.decoder=scheduled")
        if self.schedule.name == "learned" and self.hints.name != "none":
            raise InputError("algorithm.hints: they do not go with a learned schedule, take none")
        if self.likelihood.name == "trajectory" and self.hints.name != "none":
            raise InputError("algorithm.hints: a given token was committed at no step of a trajectory, take none")
        if isinstance(self.objective, PrefixRatio) and self.likelihood.name not in ORDERED:
            raise InputError(
                "algorithm.likelihood: prefix_ratio needs the order in which tokens are written, which "
                f"{self.likelihood.name} does not follow; take {' or '.join(ORDERED)}"
            )
        if isinstance(self.objective, Ratio) and self.objective.surrogate != "clip":
            for option in ("dual", "gate"):
                if getattr(self.objective, option) is not None:
                    raise InputError(
                        f"algorithm.objective.{option}: it does not go with surrogate={self.objective.surrogate}, take null"
                    )
        if self.schedule.name == "learned" and not isinstance(self.objective, Ratio):
            raise InputError("algorithm.schedule: its loss is one of a ratio, take token_ratio or sequence_ratio")
        return self

    @override
    def roots(self, group_size: int) -> int:
        return group_size

    @property
    @override
    def keeps_groups_whole(self) -> str | None:
        if self.objective.couples:
            return f"algorithm.objective={self.objective.name}"
        return None if self.hints.name == "none" else f"algorithm.hints={self.hints.name}"


class TextTrain(Train):
    """The loop's numbers."""

    passes: int = Field(1, ge=1)
    """Passes over the iteration's answers in its update, each with masks of its own."""

    @property
    @override
    def steps(self) -> int:
        return self.passes * self.updates


class TextEval(Eval):
    """Held-out evaluation, by a decoder at temperature 0 unless another is given."""

    decoder: Decoding = Decoding()
    """Decoder of the held-out answers."""


class TextConfig(RunConfig):
    """One run of a masked-diffusion language model."""

    kind: Literal["mdlm"] = "mdlm"
    model: TextModel
    prompts: TextPrompts = TextPrompts()
    rewards: list[RewardUse] = Field([RewardUse(use="solved")], min_length=1)
    algorithm: TextAlgorithm = Field(default_factory=lambda: TextAlgorithm.model_validate({}))
    train: TextTrain = TextTrain()
    eval: TextEval = TextEval()

    @model_validator(mode="after")
    def _fits(self) -> TextConfig:
        if self.train.split == "edges":
            raise InputError("train.split: an answer's tokens are updated on together, it has no edges; take samples")
        if self.algorithm.objective.couples and self.train.split != "groups" and self.train.updates > 1:
            raise InputError(
                f"train.split: {self.algorithm.objective.name} compares the answers of a group in one optimizer step; take "
                "groups"
            )
        if self.algorithm.objective.couples and self.run.engine is not None and self.run.engine.log_probs:
            raise InputError(
                f"run.engine.log_probs: {self.algorithm.objective.name} weighs whole groups, not single answers; take false"
            )
        if self.run.context_parallel > 1:
            raise InputError(
                "run.context_parallel: a language model's calls are not shared, remove it; run.sharding shares its weights"
            )
        if self.run.processes > 1:
            worker_roles.check(self.run, self.run.processes)
        check_geometry(self.train, self.algorithm, self.run.shards, generators=self.run.generators)
        hints = self.algorithm.hints
        if hints.name != "none" and (hints.tail or 0) >= self.model.length:
            raise InputError(f"algorithm.hints.tail: {hints.tail} leaves no room in model.length = {self.model.length}")
        if hints.name != "none":
            check_success(hints.reward, self.reward_names)
        rank_by = getattr(self.algorithm.objective, "rank_by", None)
        if rank_by is not None and rank_by not in self.reward_names:
            raise InputError(
                f"algorithm.objective.rank_by: {rank_by!r} is not one of rewards, {nearest(rank_by, self.reward_names)}"
            )
        size = self.model.block_size
        decoder = self.algorithm.decoder.build(self.model.length, 0, "algorithm.decoder", block_size=size)
        self.algorithm.schedule.check(decoder, self.model.length)
        self.eval.decoder.build(self.model.length, 0, "eval.decoder", block_size=size)
        return self

    @property
    def ranking(self) -> int | None:
        """Return the index of the reward by which the objective ranks good answers; None if they are not ranked."""
        rank_by = getattr(self.algorithm.objective, "rank_by", None)
        return None if rank_by is None else self.reward_names.index(rank_by)
