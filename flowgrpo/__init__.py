"""flowgrpo: align flow models and masked-diffusion language models with online reinforcement learning.

import flowgrpo
trainer = flowgrpo.Trainer("shapes", rewards=[function], prompts=["a red circle"], preset="awm_fast")
run = flowgrpo.train("configs/shapes.yaml", {"train.iterations": 4})     # .metrics, .folder, .policy
policy = flowgrpo.load_policy("path/or/hub-id", dtype="bfloat16")
samples = policy.sample(["a red circle"], seed=0)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowgrpo.commands.python.trainer import Trainer as Trainer
    from flowgrpo.commands.runs.train import Run
    from flowgrpo.flow.pipeline.policy import DiffusersPolicy


def train(config: str | Path, overrides: Iterable[str] | Mapping[str, Any] = ()) -> Run:
    """Run a config file with overrides; see `flowgrpo.commands.runs.train.train`."""
    from flowgrpo.commands.runs import train as run

    return run.train(config, overrides)


def load_policy(path: str, **options: Any) -> DiffusersPolicy:
    """Load a pipeline as a policy; see `flowgrpo.flow.pipeline.loading.load.load_policy`."""
    from flowgrpo.flow.pipeline.loading import load

    return load.load_policy(path, **options)


def __getattr__(name: str) -> Any:
    """Import `Trainer` when it is first used."""
    if name != "Trainer":
        raise AttributeError(f"module 'flowgrpo' has no attribute {name!r}")
    from flowgrpo.commands.python.trainer import Trainer

    return Trainer
