"""The configuration of a run of a masked-diffusion language model, `kind: mdlm`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, SerializeAsAny, model_validator
from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.network.block_attention import Attention
from flowgrpo.mdlm.methods import CHOICES, run_rules
from flowgrpo.mdlm.methods.credit import Credit
from flowgrpo.mdlm.methods.decoder_options import Decoding, Rollouts
from flowgrpo.mdlm.methods.likelihoods.likelihood import Likelihood, Trajectory
from flowgrpo.mdlm.methods.objectives.aggregation import Aggregation
from flowgrpo.mdlm.methods.objectives.objective import Objective, Ratio, SequenceRatio, TokenRatio
from flowgrpo.mdlm.methods.objectives.path_objectives import ORDERED, PrefixRatio
from flowgrpo.mdlm.methods.presets import BESIDE, PRESETS
from flowgrpo.mdlm.methods.schedules.schedule import Schedule
from flowgrpo.mdlm.methods.trees import Shape
from flowgrpo.schema import preset_overrides
from flowgrpo.schema.base import Choice
from flowgrpo.schema.lora import Lora, LoraPath, Quantised, check_base
from flowgrpo.schema.sections import Eval, Prompts, RewardUse, RunConfig, Train, Variant
from flowgrpo.schema.wings import AlgorithmSection, ModelSection
from flowgrpo.training.advantages.baseline import Baseline
from flowgrpo.training.advantages.clipped_ratio import both_bounds
from flowgrpo.training.advantages.group_options import rank_index
from flowgrpo.training.advantages.past_baselines import PastBaseline
from flowgrpo.training.distributed import worker_roles
from flowgrpo.training.distributed.minibatches import check_geometry
from flowgrpo.training.prompts import second_stage
from flowgrpo.training.prompts.failed_groups import check_success

if TYPE_CHECKING:
    from flowgrpo.mdlm.methods.hints import Inpainting, NoHints
    from flowgrpo.mdlm.methods.schedules.schedule import LearnedSchedule, Unscheduled

    AnySchedule = Unscheduled | LearnedSchedule  # `name` decides which
    AnyHints = NoHints | Inpainting
else:
    AnySchedule, AnyHints = Schedule, Choice

DIGITS = "digits"
OBJECTIVES = {name: kind for name, kind in CHOICES["objective"].items() if issubclass(kind, Objective)}
LONGEST = 1 << 17  # tokens of an answer; a decoder lists its blocks
DIGITS_LENGTH = 20  # tokens of an answer of `digits`, which was trained on answers of this length


class TextModel(ModelSection):
    """What is trained."""

    path: str
    """Built-in name, local folder or hub id of a masked-diffusion language model; required."""
    variant: Variant | None = None
    """Read the weight files with this word in their names (fp16); null: plain files."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the frozen weights and of the computation; trained weights are kept in float32."""
    lora: Lora | None = Lora()
    """Low-rank adapters; null trains every weight."""
    merge: LoraPath | None = None
    """LoRA (see lora.path) to merge into the weights before all of them are trained, with lora: null; null: none."""
    quantise: Quantised | None = None
    """Keep the linear layers of the frozen base's blocks in int8 or nf4; needs adapters. null: as in the files."""
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
    tree: SerializeAsAny[Shape]
    """Which answers of a group share their first steps?"""
    schedule: SerializeAsAny[AnySchedule]
    """Are the decoder's numbers actions too?"""
    hints: SerializeAsAny[AnyHints]
    """What helps a group that fails?"""
    likelihood: SerializeAsAny[Likelihood]
    """From which masked views is log p estimated?"""
    credit: SerializeAsAny[Credit]
    """Which parts of the answers are compared?"""
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
            raise InputError("algorithm.hints: a learned schedule allows no hints; take none")
        if self.likelihood.name == "trajectory" and self.hints.name != "none":
            raise InputError("algorithm.hints: trajectory needs a step for each token, hints have none; take none")
        if isinstance(self.objective, PrefixRatio) and self.likelihood.name not in ORDERED:
            raise InputError(
                "algorithm.likelihood: prefix_ratio needs the order in which tokens are written, which "
                f"{self.likelihood.name} does not follow; take {' or '.join(ORDERED)}"
            )
        if isinstance(self.objective, Ratio) and self.objective.surrogate != "clip":
            for option in ("dual", "gate"):
                if getattr(self.objective, option) is not None:
                    raise InputError(
                        f"algorithm.objective.{option}: surrogate={self.objective.surrogate} does not use it; take null"
                    )
        self._check_covariance()
        self._check_means()
        self._check_balance()
        if self.aggregation.shape is not None and not isinstance(self.objective, TokenRatio | PrefixRatio):
            raise InputError(
                f"algorithm.aggregation.shape: it weighs tokens, and {self.objective.name} has one loss for each answer; "
                "take objective=token_ratio or prefix_ratio, or null"
            )
        if self.schedule.name == "learned" and not isinstance(self.objective, Ratio):
            raise InputError("algorithm.schedule: it needs a ratio; take objective token_ratio or sequence_ratio")
        self._check_tree()
        if self.objective.solutions is not None:
            self._check_solutions()
        return self

    def _check_solutions(self) -> None:
        """Raise InputError if an axis needs answers of the policy."""
        name = self.objective.name
        if self.likelihood.name == "trajectory":
            raise InputError(
                f"algorithm.likelihood: {name} trains on solutions, which have no decoding steps; take "
                "autoregressive or monte_carlo"
            )
        if self.hints.name != "none":
            raise InputError(f"algorithm.hints: {name} learns from whole solutions, take none")
        if self.tree.name != "chain":
            raise InputError(f"algorithm.tree: {name} samples no answers that could branch, take chain")
        if self.aggregation.shape is not None:
            raise InputError(f"algorithm.aggregation.shape: {name} weighs tokens by itself, take null")
        if self.aggregation.name in ("fixed_length", "balanced"):
            raise InputError(
                f"algorithm.aggregation: {self.aggregation.name} weighs answers by their advantages, which {name} does not "
                "use; take token_mean"
            )
        if self.baseline.drops is not None:
            raise InputError(f"algorithm.baseline.{self.baseline.drops}: {name} does not use rewards; take false")

    def _check_tree(self) -> None:
        credit, tree = self.credit, self.tree
        if tree.name != "chain" and self.schedule.name == "learned":
            raise InputError("algorithm.tree: answers of one branch cannot have schedules of their own, take chain")
        if tree.name != "chain" and self.hints.name != "none":
            raise InputError("algorithm.hints: hints replace single answers, but a tree shares their tokens; take none")
        if self.likelihood.by_branch and tree.name == "chain":
            raise InputError(
                "algorithm.likelihood.shrink: chain has no branches, take a number or algorithm.tree=branch"
            )
        if credit.by_branch and tree.name == "chain":
            raise InputError(f"algorithm.credit: {credit.name} compares branches, take algorithm.tree=branch")
        if credit.name == "step_gain":
            self._check_drafts()
        if credit.by_token and not self.objective.by_token:
            fitting = [name for name, kind in OBJECTIVES.items() if kind.by_token]
            raise InputError(
                f"algorithm.objective: {self.objective.name} trains whole answers, but {credit.name} gives credit "
                f"to parts of them; take {' or '.join(fitting)}"
            )
        if credit.by_token and isinstance(self.baseline, PastBaseline):
            raise InputError(
                f"algorithm.baseline: {self.baseline.name} compares whole answers with earlier ones, but "
                f"{credit.name} gives credit to parts of them; take group_mean or leave_one_out"
            )
        pulls = isinstance(self.objective, TokenRatio) and self.objective.distillation is not None
        if pulls and not (self.likelihood.by_branch and self.trains_branches_once):
            raise InputError(
                "algorithm.objective.distillation: it compares what branches wrote on one canvas, take likelihood={name: "
                "trajectory, shrink: branch}, credit=siblings and objective.kl.level=token, or null"
            )
        if credit.name == "nested" and self.baseline.name not in ("leave_one_out", "group_mean"):
            raise InputError("algorithm.baseline: credit nested compares with means, take leave_one_out or group_mean")

    def _check_drafts(self) -> None:
        """Raise InputError for settings by which the model does not predict whole answers, or not one answer at a time."""
        if self.tree.name != "chain":
            raise InputError(
                "algorithm.credit: step_gain credits the steps of single answers, take algorithm.tree=chain"
            )
        if self.hints.name != "none":
            raise InputError("algorithm.hints: step_gain credits steps that given tokens would skip, take none")
        if self.schedule.name != "none":
            raise InputError("algorithm.schedule: step_gain gives no advantage to a whole answer; take none")
        if self.decoder.cache is not None:
            raise InputError("algorithm.decoder.cache: step_gain reads the prediction of the whole answer, take null")

    @property
    def trains_branches_once(self) -> bool:
        """Return whether the tokens of a branch are trained on in its first answer only, with the weight of all.

        This needs views that are the same in all answers of the branch, and a loss that is a sum over tokens.
        """
        likelihood, kl = self.likelihood, self.objective.kl
        alike = isinstance(likelihood, Trajectory) and likelihood.shrink in (1, "branch")
        apart = isinstance(self.objective, TokenRatio) and (kl.beta == 0 or kl.level == "token")
        return alike and apart and self.credit.by_branch

    def _check_covariance(self) -> None:
        """Raise InputError for options of a clip beside KL-Cov, which has none."""
        objective = self.objective
        if isinstance(objective, TokenRatio) and objective.covariance is not None and objective.covariance.rule == "kl":
            for option, plain in (("surrogate", "clip"), ("dual", None), ("gate", None)):
                if getattr(objective, option) != plain:
                    raise InputError(
                        f"algorithm.objective.{option}: with covariance.rule=kl no ratio is clipped, take {plain or 'null'}"
                    )

    def _check_means(self) -> None:
        """Raise InputError for options that do not fit a mean of the tokens' ratios."""
        objective = self.objective
        if not isinstance(objective, SequenceRatio):
            return
        for option, plain in (("power", 0.0), ("clamp", None)):
            if getattr(objective, option) != plain and not objective.normalised:
                raise InputError(f"algorithm.objective.{option}: it is for a mean over tokens, take normalised=true")
        for option, plain in (
            (("surrogate", "clip"), ("dual", None), ("gate", None)) if objective.clamp is not None else ()
        ):
            if getattr(objective, option) != plain:
                raise InputError(
                    f"algorithm.objective.{option}: with clamp the ratio of an answer is not clipped, take {plain or 'null'}"
                )

    def _check_balance(self) -> None:
        """Raise InputError for options that do not go with a clip range that moves."""
        objective = self.objective
        if not isinstance(objective, TokenRatio) or objective.balance is None:
            return
        if objective.surrogate == "tapered_ratio" or objective.gate is not None:
            raise InputError("algorithm.objective.balance: there is no clip range to move; take null")
        if objective.covariance is not None and objective.covariance.rule == "kl":
            raise InputError("algorithm.objective.balance: with covariance.rule=kl no ratio is clipped, take null")
        (low, high), end = both_bounds(objective.clip_range), objective.balance.end
        if end[0] > low or end[1] < high:
            raise InputError(
                f"algorithm.objective.clip_range: [{low:g}, {high:g}] cannot move to balance.end={end}; take a "
                "larger low and a smaller high, such as [0.4, 0.2]"
            )

    @property
    def needs_old(self) -> bool:
        """Return whether even a first optimizer step uses the log-probabilities under the policy that sampled."""
        return getattr(self.objective, "covariance", None) is not None

    @property
    def measure(self) -> str | None:
        """Return the number of the tokens' predictions that the update uses, `Shape.measure`; None if it uses none."""
        return None if self.aggregation.shape is None else self.aggregation.shape.measure

    @property
    def reference(self) -> str | None:
        """Return the name of the reference in `Weights`, `fixed` or `base`; None if nothing is compared with one."""
        return self.objective.kl.reference or ("fixed" if self.measure == "gated_distances" else None)

    @property
    def compares_groups(self) -> str | None:
        """Return the setting by which a loss compares the answers of a group; None if none does."""
        if self.objective.couples:
            return f"objective={self.objective.name}"
        return "aggregation.shape.rule=divergent" if self.measure == "group_spread" else None

    @override
    def roots(self, group_size: int) -> int:
        return self.tree.roots(group_size)

    @property
    @override
    def keeps_groups_whole(self) -> str | None:
        if self.compares_groups is not None:
            return f"algorithm.{self.compares_groups}"
        return None if self.hints.name == "none" else f"algorithm.hints={self.hints.name}"


class TextTrain(Train):
    """The loop's numbers."""

    passes: int = Field(1, ge=1)
    """Passes over the iteration's answers in its update, each with masks of its own."""
    semantic_entropy: float = Field(0.0, ge=0, le=1)
    """Above 0, advantages are multiplied by 1 - semantic_entropy x SE / ln n (SEED-GRPO): SE is the entropy over equal
    final answers among the n of a group, so that prompts on which the answers differ are learnt more slowly."""

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

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, written: Any) -> Any:
        """Fill in the preset's settings other than axes, unless the config has them."""
        return preset_overrides.filled(written, BESIDE, "diffu_grpo")

    @model_validator(mode="after")
    def _fits(self) -> TextConfig:
        run_rules.check(self)
        if self.run.context_parallel > 1:
            raise InputError(
                "run.context_parallel: calls of a language model cannot be split; remove it, or split the weights "
                "by run.sharding"
            )
        if self.run.processes > 1:
            worker_roles.check(self.run, self.run.processes)
        check_geometry(self.train, self.algorithm, self.run.shards, generators=self.run.generators)
        hints = self.algorithm.hints
        if hints.name != "none" and (hints.tail or 0) >= self.model.length:
            raise InputError(f"algorithm.hints.tail: {hints.tail} leaves no room in model.length = {self.model.length}")
        if hints.name != "none":
            check_success(hints.reward, self.reward_names)
        second_stage.check(self)
        _ = self.ranking  # raises where no reward has its name
        size = self.model.block_size
        decoder = self.algorithm.decoder.build(self.model.length, 0, "algorithm.decoder", block_size=size)
        self.algorithm.schedule.check(decoder, self.model.length)
        self.eval.decoder.build(self.model.length, 0, "eval.decoder", block_size=size)
        return self

    @property
    def ranking(self) -> int | None:
        """Return the index of the reward by which the objective ranks good answers; None if they are not ranked."""
        return rank_index(self.algorithm.objective, self.reward_names)
