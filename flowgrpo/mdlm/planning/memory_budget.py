"""Memory of a language model's run, from the calls measured by `mdlm.planning.memory_trace` (`plan --gpu-memory`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from flowgrpo.data import prompts
from flowgrpo.mdlm.config import TextConfig
from flowgrpo.mdlm.models.memory_estimate import policy_copies
from flowgrpo.mdlm.planning.memory_trace import Trial, trial
from flowgrpo.mdlm.planning.plan import here
from flowgrpo.training.distributed.gpu_layout import OF_NODE
from flowgrpo.training.planning.memory_budget import check_fit
from flowgrpo.training.planning.memory_phases import (
    ROLLOUT,
    UPDATE,
    Budget,
    Phase,
    measure_once,
    trained_bytes,
)
from flowgrpo.training.planning.meta_networks import few_objects
from flowgrpo.training.planning.reward_memory import reward_bytes

LETTERS, TEMPLATE = 3, 32  # least letters per prompt token, for an upper bound of tokens; tokens of a chat template


@dataclass(frozen=True, kw_only=True)
class TextBudget(Budget):
    """Memory of a language model's run."""

    config: TextConfig
    trial: Trial
    unavailable = ("model.cuda_graphs", "model.text_encoders", "model.vae", "model.vae_tiling")

    @override
    def phases(self) -> list[Phase]:
        config, trial, rows = self.config, self.trial, self.config.train.rollout_rows
        trained = trained_bytes(config, trial.trained, copies=policy_copies(config), among=self.layout.among)
        stay = {"weights": self.resident(), "rewards": reward_bytes(config), **trained}
        rebuilt = self.layer() + self.gathered_bytes()
        decode, update = trial.decode.beside(rebuilt), self.update_calls()
        phases = [
            Phase(name="rollout", rows=rows, key=ROLLOUT, fixed=stay, calls=decode),
            Phase(name="update", rows=config.train.update_rows, key=UPDATE, fixed=stay, calls=update),
        ]
        if trial.evaluate is not None:
            evaluate = trial.evaluate.beside(rebuilt)
            phases.append(Phase(name="evaluate", rows=rows, key=ROLLOUT, fixed=stay, calls=evaluate))
        return phases


def fit(config: TextConfig, gpu_bytes: int) -> dict[str, Any]:
    """Return whether a run fits a GPU, and which settings make it fit; raise InputError if it cannot start at all."""
    with budget_of(config) as budget:
        return check_fit(budget, gpu_bytes)


@contextmanager
def budget_of(config: TextConfig, of_node: int = OF_NODE) -> Iterator[TextBudget]:
    """Yield the memory of a run on machines with `of_node` GPUs; raise InputError if the run cannot start."""
    longest = max(len(prompt.text) for prompt in prompts.load_split(config.prompts, "train"))
    with here(config) as local, few_objects():
        measure = measure_once(local, lambda other: trial(other, longest // LETTERS + TEMPLATE))
        yield TextBudget(config=config, trial=measure(config), measure=measure, of_node=of_node)
