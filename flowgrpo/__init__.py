"""flowgrpo: align flow models and masked-diffusion language models with online reinforcement learning.

import flowgrpo
run = flowgrpo.train("configs/shapes.yaml", {"train.iterations": 4})     # .metrics, .folder, .policy
policy = flowgrpo.load_policy("path/or/hub-id", dtype="bfloat16")
samples = policy.sample(["a red circle"], seed=0)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
