"""The configuration of a run of a flow model, `kind: flow`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, field_validator, model_validator
from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.flow.methods import CHOICES, OBJECTIVES, graph_rules, hints, likelihood_rules, presets
from flowgrpo.flow.methods.credit.rules import Credit
from flowgrpo.flow.methods.likelihood import Likelihood
from flowgrpo.flow.methods.objectives.policy_gradient import PolicyGradient
from flowgrpo.flow.methods.trees import adaptive, stopping
from flowgrpo.flow.methods.trees.tree import Rooted
from flowgrpo.flow.pipeline.networks.attention_backends import AttentionBackend, refuse_lossy_attention
from flowgrpo.schema import preset_overrides
from flowgrpo.schema.base import Choice, Strict
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.schema.lora import Lora, LoraPath, Quantised, check_base
from flowgrpo.schema.schedule import read_part
from flowgrpo.schema.sections import Eval, RewardUse, RunConfig, Train, Variant
from flowgrpo.schema.wings import AlgorithmSection, Drafted, ModelSection
from flowgrpo.training.advantages.baseline import NESTED, Baseline
from flowgrpo.training.advantages.group_options import rank_index
from flowgrpo.training.distributed import worker_roles
from flowgrpo.training.distributed.minibatches import check_geometry
from flowgrpo.training.prompts import second_stage
from flowgrpo.training.weights import low_precision_copies
from flowgrpo.training.weights.low_precision_copies import Precision
from flowgrpo.training.weights.old_policies import Bank, Decay

if TYPE_CHECKING:
    from flowgrpo.flow.methods.hints import NoHints, Noised
    from flowgrpo.flow.methods.kernel_options import Ode, Stochastic
    from flowgrpo.flow.methods.likelihood import Elbo, Trajectory
    from flowgrpo.flow.pipeline.loading import load
    from samplers import plans
    from samplers.kernels import Kernel
    from samplers.trees import Plan

    AnyKernel = Stochastic | Ode
    AnyLikelihood = Trajectory | Elbo  # `name` decides which
    AnyHints = NoHints | Noised
else:
    AnyKernel, AnyLikelihood, AnyHints = Choice, Likelihood, Choice
    load = lazy("flowgrpo.flow.pipeline.loading.load")
    plans = lazy("samplers.plans")


class Model(ModelSection):
    """The model, its trained part, and switches of memory and speed."""

    path: str
    """Built-in name, local folder or hub id of a diffusers pipeline; required."""
    variant: Variant | None = None
    """Read the weight files with this word in their names (fp16), for each component that has such files; null: plain
    files."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the frozen weights and of the computation; trained weights are kept in float32."""
    lora: Lora | None = Lora()
    """Low-rank adapters; null trains every weight."""
    merge: LoraPath | None = None
    """LoRA (see lora.path) to merge into the weights before all of them are trained, with lora: null; null: none."""
    teacher: str | None = None
    """Model of the reference `teacher` and of teacher hints: a LoRA over the same base (a file, a folder, an export, a
    run or a hub id), or a pipeline with networks of the same shapes (a built-in name, a folder or a hub id); null:
    none."""
    quantise: Quantised | None = None
    """Keep the linear layers of the frozen base's blocks in int8 or nf4; needs adapters. null: as in the files."""
    call: dict[str, Any] = {}
    """Arguments of the pipeline's call, over those of a built-in or exported model."""
    text_encoders: Literal["keep", "offload", "free"] = "offload"
    """offload or free: encode the prompts, move the encoders to host memory or delete them, then load the transformer;
    keep: all stay on the device."""
    guidance: Literal["pipeline", "rollout", "none"] = "pipeline"
    """Guidance in training. pipeline: as in call; rollout: as in call in rollouts, off in updates (for final samples); none:
    off. Evaluation is guided as in call. Presets of final samples set rollout or none unless the config sets this."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, the same numbers."""
    offload_activations: bool = False
    """Keep activations in host memory until the backward pass: less memory of the GPU, two transfers, the same numbers."""
    vae: Literal["keep", "offload"] = "keep"
    """keep: on the device; offload: in host memory except while it encodes or decodes."""
    vae_tiling: bool = False
    """Decode in tiles: less memory, slightly different pictures, the same latents."""
    attention: AttentionBackend | None = None
    """Attention backend of diffusers; null: PyTorch's own choice, except cuDNN's."""
    compile: Literal[False, True, "auto"] = False
    """Compile the model's repeated blocks with torch.compile; auto: only if that saves the run more time than it
    takes."""
    cuda_graphs: bool = False
    """Replay a rollout's calls of the model as CUDA graphs: fewer launches, the memory of one call more, the same
    numbers."""

    @field_validator("attention", mode="before")
    @classmethod
    def _exact(cls, written: Any) -> Any:
        if isinstance(written, str):
            refuse_lossy_attention(written, "model.attention")
        return written

    @model_validator(mode="after")
    def _agree(self) -> Model:
        check_base(self.lora, self.quantise, self.merge)
        for name, given in self.call.items():
            scale = given.get("scale", 1.0) if name.endswith("attention_kwargs") and isinstance(given, dict) else 1.0
            # Diffusers resets a scale of adapters before blocks are computed again.
            if scale != 1 and self.gradient_checkpointing and self.lora is not None:
                raise InputError(
                    f"model.call.{name}.scale: with model.gradient_checkpointing the gradients would have another "
                    "scale; remove it, and multiply model.lora.alpha by it"
                )
        return self


class Algorithm(AlgorithmSection):
    """A preset with any of its seven axes replaced; see `flowgrpo.flow.methods.presets`."""

    preset: str
    """The method: a row of the table of presets."""
    tree: SerializeAsAny[Rooted]
    """Which latents are visited."""
    kernel: SerializeAsAny[AnyKernel]
    """How one step moves."""
    hints: SerializeAsAny[AnyHints]
    """What helps a group that fails."""
    likelihood: SerializeAsAny[AnyLikelihood]
    """What the policy makes more or less likely: the steps of trajectories, or final samples."""
    credit: SerializeAsAny[Credit]
    """Which edge earned the reward."""
    baseline: SerializeAsAny[Baseline]
    """What a unit's reward is compared with."""
    objective: SerializeAsAny[PolicyGradient]
    """How the policy moves: loss, weights of the steps, divergences."""

    @model_validator(mode="before")
    @classmethod
    def _choose(cls, written: Any) -> dict[str, Any]:
        return preset_overrides.build_axes(written, presets.PRESETS, CHOICES, "flow_grpo")

    @override
    def roots(self, group_size: int) -> int:
        return self.tree.roots(group_size)

    def plan(self, kernels: Sequence[Kernel], group_size: int, seed: int, iteration: int) -> Plan:
        """Return the plan of an iteration's trees, in which trained moves are marked; for arguments see `Rooted.plan`."""
        if self.kernel.name == "ode":
            plan = plans.chain(kernels, (), ())
        else:
            plan = self.likelihood.plan(self.tree.plan(kernels, group_size, seed, iteration))
        return plan if self.kernel.solver == "euler" else plans.second_order(plan)

    @property
    @override
    def keeps_groups_whole(self) -> str | None:
        whole = {"objective": self.objective.couples == "group", "hints": self.hints.name != "none"}
        settings = (f"algorithm.{axis}={getattr(self, axis).name}" for axis, needed in whole.items() if needed)
        return self.tree.keeps_groups_whole or next(settings, None)

    @property
    @override
    def ratio_hindrance(self) -> str | None:
        if self.tree.adapts:
            return "the tree adaptive counts ages in iterations; take another tree"
        if self.likelihood.name == "elbo" and not (self.likelihood.anchor == "old" and self.likelihood.old.copies):
            return "algorithm.likelihood has another anchor or an old policy that lags; take anchor=old with old.most=0"
        return None

    @property
    def stop(self) -> stopping.Stop | None:
        """Return how chains are stopped early; None if all go to the end."""
        return getattr(self.tree, "stop", None)

    @property
    def sampler(self) -> str:
        """Return the name of the policy that samples rollouts."""
        return self.likelihood.sampler if self.likelihood.name == "elbo" else "live"

    @property
    def keeps_shared(self) -> bool:
        """Return whether rollouts keep the states at which trees split, which `likelihood.bridge` needs."""
        return (
            self.likelihood.name == "elbo" and self.likelihood.bridge and self.tree.name not in likelihood_rules.CHAINS
        )

    @property
    def _policies(self) -> set[str]:
        return self.likelihood.policies | self.objective.policies

    @property
    def old(self) -> Decay | None:
        """Return how the old policy follows the trained one; None if there is no old policy."""
        return self.likelihood.old if self.likelihood.name == "elbo" and "old" in self._policies else None

    @property
    def bank(self) -> Bank | None:
        """Return which snapshots of the trained policy are kept; None if there is no bank."""
        return self.likelihood.bank if self.likelihood.name == "elbo" and "bank" in self.likelihood.policies else None

    @property
    def snapshots(self) -> int:
        """Return the largest number of snapshots that are kept."""
        return 0 if self.bank is None else self.bank.keep

    @property
    def reference(self) -> str | None:
        """Return the kind of reference, see `training.weights.trained_weights.Weights`; None if there is no reference."""
        if "reference" in self._policies:
            return self.objective.kl.reference
        return "teacher" if getattr(self.hints, "source", None) == "teacher" else None

    @model_validator(mode="after")
    def _agree(self) -> Algorithm:
        objective, form = self.objective.name, self.kernel.log_prob
        if self.likelihood.name not in self.objective.likelihoods:
            fitting = [name for name, kind in OBJECTIVES.items() if self.likelihood.name in kind.likelihoods]
            raise InputError(
                f"algorithm.objective: {objective} needs algorithm.likelihood={self.objective.likelihoods[0]}; "
                f"{self.likelihood.name} goes with {', '.join(fitting)}"
            )
        if self.reference is None and self.objective.kl.reference != "fixed":
            raise InputError("algorithm.objective.kl.beta: a base or moving reference needs a value above 0")
        if self.likelihood.name != "elbo" and getattr(self.credit, "starts", False):
            raise InputError("algorithm.credit.starts: it is for algorithm.likelihood=elbo; remove it")
        if self.likelihood.name == "elbo":
            likelihood_rules.check(self)
        else:
            likelihood_rules.check_steps(self)
        if objective == "normalised_ratio" and form != "mean":
            raise InputError(f"algorithm.kernel.log_prob: normalised_ratio needs the form mean, not {form}; take mean")
        if self.objective.step_weights == "noise_aware" and form == "constant_free":
            raise InputError(
                "algorithm.objective.step_weights: noise_aware removes a factor 1 / std, which constant_free does "
                "not have; take equalised, or algorithm.kernel.log_prob=mean"
            )
        if self.credit.name == "nested" and self.baseline.name != "leave_one_out":
            raise InputError(NESTED)
        if self.objective.span != "edge":
            likelihood_rules.check_span(self)
        if self.tree.adapts:
            adaptive.check(self)
        stopping.check(self)
        hints.check(self)
        return self


class Draft(Drafted):
    """Choose the starts of a group's roots by a draft (Sol-RL): keep the best and the worst of a larger pool."""

    pool: int = Field(4, ge=2)
    """Number of starts that are sampled, as a multiple of those that are needed."""
    call: dict[str, Any] = {"num_inference_steps": 6}
    """Arguments that override model.call while the draft is sampled; few steps are enough to rank the starts."""
    precision: Precision | None = None
    """Sample the draft with copies of the linear layers that multiply in int8 or fp8, or hold weights in nf4; adapters act
    on them unchanged. null: with the network itself."""


class FlowTrain(Train):
    """Sizes and numbers of the training loop, and how the starts of a group are chosen."""

    draft: Draft | None = None
    """Choose the starts of a group by a draft; null: take the first."""
    replay: Literal["auto", "always", "never"] = "auto"
    """Whether the first update of an iteration repeats the rollout's model calls or uses their autograd graphs; the
    numbers are the same. always: repeat all; never: keep all graphs; auto: keep the graphs of the first trained steps,
    in at most half of the free memory and, without a GPU, at most half of the memory that the process takes without
    graphs."""


class FlowEval(Eval):
    """Held-out evaluation by ODE."""

    call: dict[str, Any] = {}
    """Arguments that override model.call while held-out prompts are sampled."""
    adapter_steps: Annotated[list[float], BeforeValidator(read_part)] | None = None
    """Part of the schedule in which the adapters act, first:end as fractions of the steps (0:0.6); the base model takes
    the other steps, against reward hacking (MixGRPO). null: all steps."""


class Data(Strict):
    """Stored groups to train on, in place of rollouts."""

    groups: str | None = None
    """Folder of flowgrpo sample --groups. A method of final samples trains on its groups in place of rollouts; null: the
    run samples its own."""
    rewards: dict[str, float] = {}
    """Stored rewards to train on, by name, with their weights; {}: those of the section rewards."""

    @model_validator(mode="after")
    def _together(self) -> Data:
        if self.rewards and self.groups is None:
            raise InputError("data.rewards: it names rewards of data.groups, but data.groups is not set")
        return self


class Config(RunConfig):
    """The configuration of a run of a flow model."""

    kind: Literal["flow"] = "flow"
    model: Model
    data: Data = Data()
    """Stored groups to train on, in place of rollouts."""
    rewards: list[RewardUse] = Field([RewardUse(use="shapes")], min_length=1)
    algorithm: Algorithm = Field(default_factory=lambda: Algorithm.model_validate({}))
    train: FlowTrain = FlowTrain()
    eval: FlowEval = FlowEval()

    @property
    @override
    def stored_groups(self) -> str | None:
        return self.data.groups

    @property
    @override
    def keeps_graphs(self) -> bool:
        return self.train.replay != "always" and self.graph_hindrance is None

    def moved(self, part: int) -> bool:
        """Return whether the policy may have moved since the rollout when optimizer step `part` of an iteration begins."""
        return part > 0 or self.run.staleness > 0

    @property
    def graph_hindrance(self) -> str | None:
        """Return the setting, as text, that prevents the first update from using the rollout's graphs; None without one."""
        return graph_rules.hindrance(self)

    @property
    @override
    def exchanges_base(self) -> bool:
        teacher = self.model.teacher
        return self.model.lora is not None and teacher is not None and load.is_pipeline(teacher)

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, written: Any) -> Any:
        """Fill in the preset's settings other than axes, unless the config has them."""
        return preset_overrides.filled(written, presets.BESIDE, "flow_grpo")

    @model_validator(mode="after")
    def _geometry(self) -> Config:
        roots = self.algorithm.tree.roots(self.train.group_size)
        sharing = self.run.context_parallel
        trainers = sharing
        if self.run.processes > 1:
            worker_roles.check(self.run, self.run.processes)
            trainers = self.run.trainers(self.run.processes)
        check_geometry(self.train, self.algorithm, trainers, sharing=sharing, generators=self.run.generators)
        likelihood_rules.check_paths(self)
        hints.check_run(self)
        if self.algorithm.likelihood.name == "elbo":
            likelihood_rules.check_run(self)
        elif self.model.guidance == "rollout":
            raise InputError(
                "model.guidance: the update scores steps with the guidance of the rollout; take pipeline or none "
                "(rollout is for algorithm.likelihood=elbo)"
            )
        if self.data.groups is not None:
            likelihood_rules.check_stored(self)
        rank_index(
            self.algorithm.objective, list(self.data.rewards) or self.reward_names
        )  # raises where none has its name
        stopping.check_run(self)
        second_stage.check(self)
        if self.model.teacher is not None and self.algorithm.reference != "teacher":
            raise InputError(
                "model.teacher: nothing uses it; set algorithm.objective.kl.reference=teacher with a beta, "
                "algorithm.hints.source=teacher, or take null"
            )
        if self.train.replay == "never" and (setting := self.graph_hindrance) is not None:
            raise InputError(f"train.replay: with {setting} no update can use the graphs of a rollout; take auto")
        if self.train.draft is not None and self.algorithm.tree.start == "shared":
            raise InputError("train.draft: it chooses the starts of a group, set algorithm.tree.start=independent")
        for word, key in low_precision_copies.of_copies(self).items():
            low_precision_copies.check(word, self.model, key)
            if self.model.cuda_graphs and self.model.lora is None:
                raise InputError(f"model.cuda_graphs: each rollout computes with another copy by {key}; set {key}=null")
        if self.model.cuda_graphs and (sharing > 1 or self.run.sharding != "none"):
            key, value = ("context_parallel", 1) if sharing > 1 else ("sharding", "none")
            raise InputError(f"model.cuda_graphs: calls that several processes make together; set run.{key}={value}")
        keeps_base = self.algorithm.reference in ("fixed", "base") and self.run.sharding == "none"
        if self.eval.adapter_steps is not None and self.model.lora is None and not keeps_base:
            raise InputError(
                "eval.adapter_steps: with model.lora=null there is no base model beside the trained one; train adapters, or "
                "keep a copy of it by algorithm.objective.kl.reference=fixed, a beta above 0 and run.sharding=none"
            )
        if self.prompts.pick.budget != "equal" and roots == 1:
            raise InputError(
                f"prompts.pick.budget: a group of {self.train.group_size} is one {self.algorithm.tree.name} tree, "
                "so samples cannot move between prompts; take a larger train.group_size, or equal"
            )
        return self
