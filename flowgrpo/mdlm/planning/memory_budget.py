"""The memory of a language model's run, from what `mdlm.planning.memory_trace` measured (`flowgrpo plan --gpu-memory`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from typing_extensions import override

from flowgrpo.data import prompts
from flowgrpo.mdlm.config import TextConfig
from flowgrpo.mdlm.planning.memory_trace import Trial, trial
from flowgrpo.mdlm.planning.plan import here
from flowgrpo.schema.lora import Lora
from flowgrpo.training.distributed.gpu_layout import OF_NODE
from flowgrpo.training.planning.memory_budget import (
    ROLLOUT,
    UPDATE,
    Budget,
    Phase,
    at_key,
    can_share,
    fitted,
    gathers,
    learnt,
    lines,
    rewards_of,
    step,
    switched,
)
from flowgrpo.training.planning.meta_networks import few_objects
from flowgrpo.training.weights import quantisation

__all__ = ["budget_of", "fit", "lines"]

SWITCHES = (
    ("model.gradient_checkpointing", True),
    ("run.sharding", "fsdp2"),
    ("model.quantise", "int8"),
    ("model.quantise", "nf4"),
)
MEASURED = ("model.dtype", "model.lora")  # what a trial was made with
LETTERS, TEMPLATE = 3, 32  # of a prompt for each token at the least; tokens of a chat's template


@dataclass(frozen=True, kw_only=True)
class TextBudget(Budget):
    """The memory of a language model's run.

    Attributes:
        config: of the run, with a switch set perhaps.
        trial: what its calls allocate.
        rewards: bytes of the weights of its rewards.
        measure: the trial of a run that trains other numbers, or computes in another type.
    """

    config: TextConfig
    trial: Trial
    rewards: int
    measure: Callable[[TextConfig], Trial]
    of_node: int = OF_NODE

    @override
    def phases(self) -> list[Phase]:
        model, train, trial, kl = self.config.model, self.config.train, self.trial, self.config.algorithm.objective.kl
        form, whole = model.quantise, model.lora is None
        spared = quantisation.size(trial.shapes, trial.width, None) - quantisation.size(trial.shapes, trial.width, form)
        layer = 0 if form is None or trial.dequantises else quantisation.made_anew([trial.shapes], trial.width)
        base, among = trial.weights - spared, self.layout.among
        gathered = gathers(self.config, [trial.shapes], trial.width, among=among)
        with_gradients = gathered * (2 if whole else 1)  # of a block, until they are summed
        # As something else than the base.
        begun = model.lora is None or (model.lora.path is not None and kl.reference == "fixed")
        stay = {
            "weights": self.rewards + (0 if whole else -(-base // among)),
            **learnt(self.config, trial.trained, copies=int(begun and kl.reference is not None), among=among),
        }
        checkpointed = trial.update_checkpointed if model.gradient_checkpointing else None
        update = (checkpointed or trial.update).beside(layer + with_gradients)
        update |= step(self.config, trial.trained, among=among)
        rows = train.rollout_rows
        phases = [
            Phase(name="rollout", rows=rows, key=ROLLOUT, fixed=stay, calls=trial.decode.beside(layer + gathered)),
            Phase(name="update", rows=train.update_rows, key=UPDATE, fixed=stay, calls=update),
        ]
        if trial.evaluate is not None:
            calls = trial.evaluate.beside(layer + gathered)
            phases.append(Phase(name="evaluate", rows=rows, key=ROLLOUT, fixed=stay, calls=calls))
        return phases

    @override
    def switches(self) -> list[tuple[str, Any]]:
        model, shapes = self.config.model, {"model": self.trial.shapes}
        impossible = {
            "model.gradient_checkpointing": self.trial.update_checkpointed is None,
            "run.sharding": not can_share(self.config),
            "model.quantise": model.lora is None or model.quantise == "nf4" or not quantisation.can(shapes, "int8"),
        }
        return [
            (key, value)
            for key, value in SWITCHES
            if at_key(self.config, key) != value and not impossible[key]
            if value != "nf4" or quantisation.can(shapes, "nf4")
        ]

    @override
    def switched(self, key: str, value: Any) -> TextBudget:
        config = switched(self.config, key, value)
        return replace(self, config=config, trial=self.measure(config) if key in MEASURED else self.trial)


def fit(config: TextConfig, gpu_bytes: int) -> dict[str, Any]:
    """Whether a run fits a GPU, and what to set where it does not; see `training.planning.memory_budget.fitted`.

    Raises:
        InputError: there is no such model, or it has not what the config asks for.
    """
    with budget_of(config) as found:
        return fitted(found, gpu_bytes, rewards_of(config)[1])


@contextmanager
def budget_of(config: TextConfig, of_node: int = OF_NODE) -> Iterator[TextBudget]:
    """The memory of a run whose machines have so many GPUs, as long as the context is open; see `fit`."""
    longest = max(len(prompt.text) for prompt in prompts.load_split(config.prompts, "train"))
    with here(config) as placed, few_objects():

        @cache
        def of_kind(dtype: str, full: bool) -> Trial:
            lora = None if full else config.model.lora or Lora()
            model = placed.model.model_copy(update={"dtype": dtype, "lora": lora})
            return trial(placed.model_copy(update={"model": model}), longest // LETTERS + TEMPLATE)

        def measure(other: TextConfig) -> Trial:
            return of_kind(other.model.dtype, other.model.lora is None)

        yield TextBudget(
            config=config,
            trial=measure(config),
            rewards=rewards_of(config)[0],
            measure=measure,
            of_node=of_node,
        )
