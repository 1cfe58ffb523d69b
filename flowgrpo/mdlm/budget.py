"""The memory of a language model's run, from what `mdlm.trial` measured, and `flowgrpo plan CONFIG --gpu-memory GIB`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from flowgrpo.data import prompts
from flowgrpo.mdlm.config import TextConfig
from flowgrpo.mdlm.loading import block_size_of
from flowgrpo.mdlm.plan import here
from flowgrpo.mdlm.trial import Trial, trial
from flowgrpo.training import quantise, quantise_libraries
from flowgrpo.training.budget import ROLLOUT, UPDATE, Budget, Phase, fitted, lines, rewards_of, switched
from flowgrpo.training.optimizers import OPTIMIZERS

__all__ = ["fit", "lines"]

SWITCHES = (("model.gradient_checkpointing", True), ("model.quantise", "int8"), ("model.quantise", "nf4"))
LETTERS, TEMPLATE = 3, 32  # of a prompt for each token at the least; tokens of a chat's template


@dataclass(frozen=True)
class TextBudget(Budget):
    """The memory of a language model's run.

    Attributes:
        config: of the run, with a switch set perhaps.
        trial: what its calls allocate.
        rewards: bytes of the weights of its rewards.
    """

    config: TextConfig
    trial: Trial
    rewards: int

    @override
    def phases(self) -> list[Phase]:
        model, train, trial, kl = self.config.model, self.config.train, self.trial, self.config.algorithm.objective.kl
        form, whole = model.quantise, model.lora is None
        spared = quantise.size(trial.shapes, trial.width, None) - quantise.size(trial.shapes, trial.width, form)
        layer = 0 if form is None else quantise.largest([trial.shapes], trial.width)
        begun = whole or (model.lora.path is not None and kl.reference == "fixed")  # as something else than the base
        copies = 1 + (train.ema is not None) + (begun and kl.reference is not None)
        stay = {
            "weights": self.rewards + (0 if whole else trial.weights - spared),
            "trained": 4 * copies * trial.trained,
            "optimizer": round(OPTIMIZERS[train.optimizer.name].bytes_per_number * trial.trained),
            "activations": layer,
        }
        each = trial.update_checkpointed if model.gradient_checkpointing else trial.update
        kept = 0 if model.gradient_checkpointing else quantise_libraries.kept(trial.shapes, trial.width, form)
        learns = stay | {"gradients": 4 * trial.trained, "activations": max(layer, kept)}
        return [
            Phase(name="rollout", rows=train.rollout_rows, key=ROLLOUT, fixed=stay, each=trial.decode),
            Phase(name="update", rows=train.micro_batch, key=UPDATE, fixed=learns, each=each),
        ]

    @override
    def switches(self) -> list[tuple[str, Any]]:
        model = self.config.model
        fixed = model.lora is None or model.quantise == "nf4"
        return [
            (key, value)
            for key, value in SWITCHES
            if getattr(model, key.removeprefix("model.")) != value and not (fixed and key == "model.quantise")
        ]

    @override
    def switched(self, key: str, value: Any) -> TextBudget:
        return replace(self, config=switched(self.config, key, value))


def fit(config: TextConfig, gpu_bytes: int) -> dict[str, Any]:
    """Whether a run fits a GPU, and what to set where it does not; see `training.budget.fitted`.

    Raises:
        InputError: there is no such model, or it has not what the config asks for.
    """
    longest = max(len(prompt.text) for prompt in prompts.load_split(config.prompts, "train"))
    with here(config) as placed:
        model = placed.model
        block_size = block_size_of(model.path, model.attention, model.block_size)
        measured = trial(placed, longest // LETTERS + TEMPLATE, block_size)
    rewards, unknown = rewards_of(config)
    return fitted(TextBudget(config, measured, rewards), gpu_bytes, unknown)
