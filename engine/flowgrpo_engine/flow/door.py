"""Entry points for engine rollouts of a flow model: refuse unsupported runs, contact the engines, roll out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flowgrpo.data.prompts import Prompt, Row
from flowgrpo.flow.config import Config
from flowgrpo.flow.pipeline.loading.load import planned_class
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.schema.engine import Engine
from flowgrpo.training.state import RunState
from flowgrpo.training.weights.trained_weights import Weights
from flowgrpo_engine import asking
from flowgrpo_engine.flow import correction, request
from flowgrpo_engine.flow.adapters import Adapters
from flowgrpo_engine.flow.client import Client
from flowgrpo_engine.flow.rollout import EngineRollout
from samplers.trees import Plan, Root, Tree


@dataclass(frozen=True)
class Drawn:
    """An engine's log-probabilities of the edges that it sampled.

    Attributes:
        log_probs: (nodes,) log-probability of each trained edge under the engine, in the form of its kernel.
        truncate: the largest weight of an edge.
    """

    tree: Tree
    log_probs: torch.Tensor
    truncate: float

    @property
    def correction(self) -> torch.Tensor:
        """Weight (nodes,) of the edge to each node; see `correction.edge_weights`."""
        return correction.edge_weights(self.tree, self.log_probs, self.truncate)

    def line(self, run: RunState) -> dict[str, Any]:
        """Return the metrics of the mismatch over all processes."""
        gap = correction.mismatch(self.tree, self.log_probs, self.truncate)
        return asking.report_mismatch(run, gap, unit="dimension", same="model, precision and guidance")


@dataclass(frozen=True)
class Door:
    """Rollouts by engines in place of a policy."""

    rollout: EngineRollout

    def seed(self, seed: int, iteration: int, group: int, start: int) -> int:
        """Return the seed from which the engine draws a sample's start and noise."""
        return asking.seed_of(seed, iteration, group) + start

    def roll_out(
        self, run: RunState, plan: Plan, roots: Sequence[Root], *, micro_batch: int, keep_means: bool
    ) -> tuple[Tree, torch.Tensor, Drawn]:
        """Return the tree of chains from `roots`, its decoded samples in the order of the leaves, and `Drawn`.

        Raises:
            EngineLost: an engine is gone, or did something else; raised on all processes.
        """

        def ask() -> Any:
            return self.rollout.roll_out(plan, roots, micro_batch=micro_batch, keep_means=keep_means)

        rolled = asking.roll_out(run, self.rollout.adapters, ask)
        return rolled.tree, rolled.samples, Drawn(rolled.tree, rolled.engine, self.rollout.section.truncate)


def check(settings: Config, prompts: Sequence[Prompt] = ()) -> None:
    """Refuse a run that an engine cannot roll out for.

    Raises:
        InputError: the sentence says what to set instead.
    """
    request.check(settings, planned_class(settings.model.path), prompts)


def greet(section: Engine) -> None:
    """Contact each engine of a run.

    Raises:
        InputError: an engine does not answer, or answers something else.
    """
    Client(section).greet()


def build(settings: Config, policy: DiffusersPolicy, weights: Weights, rows: Sequence[Row]) -> Door:
    """Return the door of a policy, after a trial: one sample whose states, sigmas and size must fit the policy.

    Raises:
        InputError: they do not, or the engine does not answer.
    """
    section, run = settings.run.engine, settings.run
    assert section is not None, "asked of runs with an engine"
    folder = run.folder / "engine" if section.folder is None else Path(section.folder)
    rollout = EngineRollout(section, policy, Adapters(Client(section), weights, folder, run.name))
    kernels = settings.algorithm.kernel.kernels(len(policy.sigmas) - 1)
    rollout.try_out(settings.algorithm.tree.plan(kernels, settings.train.group_size, run.seed, 0), rows[0])
    return Door(rollout)
