"""State of one run on one process, shared by the parts of the training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import InputError
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.advantages.reward_combination import Combination
from flowgrpo.training.distributed.assignment import Assignment, Member, assign_roots
from flowgrpo.training.distributed.collectives import Collectives, build_collectives
from flowgrpo.training.distributed.data_shard import DataShard, data_shards
from flowgrpo.training.distributed.worker_roles import Roles, assign_roles
from flowgrpo.training.prompts.prompt_groups import Groups, add_second_stage, build_groups
from flowgrpo.training.prompts.prompt_statistics import PromptStats
from flowgrpo.training.reports.report import Report
from flowgrpo.training.weights import optimizers
from flowgrpo.training.weights.backward_counter import BackwardCounter
from flowgrpo.training.weights.policy_versions import Versions
from flowgrpo.training.weights.trained_weights import Weights
from rewards import Reward


@dataclass
class RunState:
    """State of one run on one process.

    Attributes:
        config: the configuration; batch sizes found by probing replace `auto` in it.
        policy: the model, which counts its evaluations.
        backward: counts the evaluations whose backward pass has run.
        weights: the trained weights of the policy.
        parameter_groups: the optimizer's groups; by default one group of all parameters.
        roles: which processes train, generate and evaluate.
        shards: data shards of this process: one, or several if it is a generator.
        shard: the data shard that this process works on now.
        done: number of finished iterations.
        beta: coefficient of the KL term; may adapt.
        memory: what the baseline remembers of all rewards, see `Baseline.remember`.
        combination: how the run's rewards are combined, for evaluations.
        credited: how the rewards that are trained on are combined; differs from `combination` if a run trains on stored
            groups, which have their own rewards.
        reward_names: names of the rewards that are trained on.
    """

    config: RunConfig
    policy: Any
    weights: Weights
    _: KW_ONLY
    rewards: Sequence[Reward]
    train_prompts: Sequence[Prompt]
    eval_prompts: Sequence[Prompt] = ()
    eval_rewards: Sequence[Reward] = ()
    accelerator: Accelerator = field(default_factory=Accelerator)
    shards: Sequence[DataShard] = ()
    parameter_groups: list[dict[str, Any]] | None = None
    backward: BackwardCounter = field(init=False)
    roles: Roles = field(init=False)
    shard: DataShard = field(init=False)
    collectives: Collectives = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    learning_rates: list[float] = field(init=False)
    scaler: torch.amp.GradScaler = field(init=False)
    combination: Combination = field(init=False)
    reward_names: list[str] = field(init=False)
    credited: Combination = field(init=False)
    prompt_stats: PromptStats = field(init=False)
    versions: Versions = field(init=False)
    report: Report = field(init=False)
    beta: float = field(init=False)
    memory: list[float] = field(default_factory=list)
    done: int = 0

    def __post_init__(self) -> None:
        config, train = self.config, self.config.train
        self.eval_prompts = self.eval_prompts[: config.eval.prompts]
        self.backward = BackwardCounter(self.weights.modules.values())
        self.roles = assign_roles(config.run, self.accelerator.num_processes)
        self.shards = self.shards or data_shards(self.accelerator, config.run.context_parallel, self.roles)
        self.shard = self.shards[0]
        self.collectives = build_collectives(self.accelerator, self.shard, self.weights.lockstep, self.roles)
        groups = self.parameter_groups or [{"params": self.weights.parameters}]
        self.learning_rates = [group.get("lr", train.learning_rate) for group in groups]
        self.optimizer = optimizers.build(train, groups)
        # float16 has too small a range for gradients; for other types the scaler is disabled.
        self.scaler = torch.amp.GradScaler(self.accelerator.device.type, enabled=config.model.dtype == "float16")
        self.combination = self.credited = Combination.of(self.rewards, config.algorithm.baseline)
        self.reward_names = [reward.name for reward in self.rewards]
        self.prompt_stats = PromptStats(train.half_life)
        self.versions = Versions(self.weights, config.run.staleness)
        self.report = Report(self.folder, self.accelerator, train.iterations)
        self.beta = config.algorithm.objective.kl.beta

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.config.run.folder

    @property
    def checkpoint_folder(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.folder / "checkpoints"

    @property
    def evaluations(self) -> int:
        """Model evaluations of this process so far."""
        return self.policy.evaluations

    @evaluations.setter
    def evaluations(self, count: int) -> None:
        self.policy.evaluations = count

    @property
    def held_out(self) -> Sequence[Prompt]:
        """The held-out prompts if this process samples them, else an empty list."""
        return self.eval_prompts if self.roles.samples_held_out(self.accelerator.process_index) else ()

    def groups(self, iteration: int) -> Groups:
        """Return the groups of an iteration on all processes.

        They are chosen by the prompt statistics of the policy version that samples the iteration; see `run.staleness`.
        """
        known = self.versions.stats_at(iteration, self.prompt_stats)
        return build_groups(self.config, len(self.train_prompts), known, iteration)

    def second_stage(self, groups: Groups, outcomes: tuple[torch.Tensor, list[Member]]) -> Groups:
        """Return the groups with the roots of a second stage; a collective call of all processes that train.

        `outcomes` are the rewards (E, R) of this process's samples of the first stage, and the root of each.
        """
        values, members = outcomes
        own = zip(members, self.credited.total(values).tolist(), strict=True)
        rewards = sorted(self.collectives.gather_shards(list(own)), key=lambda each: each[0])
        return add_second_stage(self.config, groups, [(group, total) for (group, _), total in rewards])

    def everyone(self, value: Any) -> list[Any]:
        """Gather a value from every process of the run, of any role; a collective call."""
        self.weights.lockstep.join()
        return gather_object([value])

    def on_main(self, read: Callable[[], Any]) -> Any:
        """Return, on every process, what `read` returns on the main process: their disks may differ. A collective call.

        Raises the InputError of `read`.
        """
        result: Any = None
        if self.accelerator.is_main_process:
            try:
                result = read()
            except InputError as error:
                result = error
        answer = self.everyone(result)[0]
        if isinstance(answer, InputError):
            raise answer
        return answer

    def assignment(self, iteration: int, groups: Groups) -> Assignment:
        """Return the roots of an iteration, or of its second stage, that each process samples from."""
        return assign_roots(self.config, groups, iteration=iteration, shard=self.shard)

    def gather_rolled(self, objects: list[Any]) -> list[Any]:
        """Concatenate the lists of all data shards; with `run.generators`, return `objects`: a generator rolls out alone."""
        return objects if self.roles.generators else self.collectives.gather_shards(objects)

    def set_learning_rate(self, number: int) -> None:
        """Set the learning rates of the iteration's optimizer step `number`, counted from 0."""
        train = self.config.train
        factor = train.schedule.factor(self.done * train.steps + number, train.iterations * train.steps)
        for group, rate in zip(self.optimizer.param_groups, self.learning_rates, strict=True):
            group["lr"] = rate * factor
