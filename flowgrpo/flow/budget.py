"""The memory of a flow model's run, from what `flow.trial` measured, and `flowgrpo plan CONFIG --gpu-memory GIB`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from flowgrpo.data import prompts
from flowgrpo.data.prompts import Row
from flowgrpo.flow.config import Config
from flowgrpo.flow.pipeline import weightless
from flowgrpo.flow.pipeline.switches import DECODERS
from flowgrpo.flow.pipeline.traits import TRAINED
from flowgrpo.flow.plan import call_and_branches, kept_states
from flowgrpo.flow.trial import Trial, trial
from flowgrpo.training import quantise, quantise_libraries
from flowgrpo.training.budget import ROLLOUT, UPDATE, Budget, Phase, fitted, lines, rewards_of, switched
from flowgrpo.training.optimizers import OPTIMIZERS

__all__ = ["fit", "lines"]

SWITCHES = (
    ("model.text_encoders", "offload"),
    ("model.vae", "offload"),
    ("model.vae_tiling", True),
    ("model.gradient_checkpointing", True),
    ("model.quantise", "int8"),
    ("model.quantise", "nf4"),
)


@dataclass(frozen=True)
class FlowBudget(Budget):
    """The memory of a flow model's run.

    Attributes:
        config: of the run, with a switch set perhaps.
        trial: what its calls allocate.
        states: how many latent states of a rollout stay until they are trained on.
    """

    config: Config
    trial: Trial
    states: int

    @override
    def phases(self) -> list[Phase]:
        model, train, trial = self.config.model, self.config.train, self.trial
        weights = trial.components | {name: self._network(name) for name in trial.shapes}
        networks = sum(size for name, size in weights.items() if name.startswith(TRAINED))
        encoders = sum(size for name, size in weights.items() if name.startswith("text_encoder"))
        decoders = sum(size for name, size in weights.items() if name in DECODERS)
        others = sum(weights.values()) - networks - encoders - decoders
        visiting = decoders if model.vae == "offload" else 0
        resident = networks + others + decoders - visiting + (encoders if model.text_encoders == "keep" else 0)
        stay = {"weights": resident, **self._learnt(), "states": self.states * trial.state}
        layer = 0 if model.quantise is None else quantise.largest(trial.shapes.values(), trial.width)
        decode = trial.decode_tiled if model.vae_tiling and trial.decode_tiled else trial.decode
        checkpointed = trial.update_checkpointed if model.gradient_checkpointing else None
        kept = 0  # of the weights, which torchao's graphs keep as they were made
        if not model.gradient_checkpointing:
            kept = sum(quantise_libraries.kept(own, trial.width, model.quantise) for own in trial.shapes.values())
        learns = stay | {"gradients": 4 * trial.trained, "activations": max(layer, kept)}
        rows = train.rollout_rows
        return [
            Phase(name="encode", rows=1, key=None, fixed={"weights": encoders + decoders + others}, each=trial.encode),
            Phase(name="rollout", rows=rows, key=ROLLOUT, fixed=stay | {"activations": layer}, each=trial.rollout),
            Phase(name="decode", rows=rows, key=ROLLOUT, fixed=stay | {"weights": resident + visiting}, each=decode),
            Phase(name="update", rows=train.micro_batch, key=UPDATE, fixed=learns, each=checkpointed or trial.update),
        ]

    @override
    def switches(self) -> list[tuple[str, Any]]:
        model, trial = self.config.model, self.trial
        impossible = {
            "model.vae_tiling": trial.decode_tiled is None,
            "model.gradient_checkpointing": trial.update_checkpointed is None,
            "model.quantise": model.lora is None or model.quantise == "nf4",
            "model.text_encoders": model.text_encoders == "free",
        }
        return [
            (key, value)
            for key, value in SWITCHES
            if getattr(model, key.removeprefix("model.")) != value and not impossible.get(key, False)
        ]

    @override
    def switched(self, key: str, value: Any) -> FlowBudget:
        return replace(self, config=switched(self.config, key, value))

    def _network(self, name: str) -> int:
        """Bytes of the frozen weights of a network that is adapted; all of one that is trained are counted as trained."""
        if self.config.model.lora is None:
            return 0
        shapes, width = self.trial.shapes[name], self.trial.width
        spared = quantise.size(shapes, width, None) - quantise.size(shapes, width, self.config.model.quantise)
        return self.trial.components[name] - spared

    def _learnt(self) -> dict[str, int]:
        train, kl = self.config.train, self.config.algorithm.objective.kl
        lora = self.config.model.lora
        begun = lora is None or (lora.path is not None and kl.reference == "fixed")  # as something else than the base
        copied = kl.beta > 0 and (begun or kl.reference == "moving")
        copies = 1 + (train.ema is not None) + copied
        moments = OPTIMIZERS[train.optimizer.name].bytes_per_number
        return {"trained": 4 * copies * self.trial.trained, "optimizer": round(moments * self.trial.trained)}


def fit(config: Config, gpu_bytes: int) -> dict[str, Any]:
    """Whether a run fits a GPU, and what to set where it does not; see `training.budget.fitted`.

    Raises:
        InputError: there are no configs of the model, or the run asks for what its pipeline has not.
    """
    longest = max(prompts.load_split(config.prompts, "train"), key=lambda p: len(p.text))
    with weightless.configs(config.model.path) as folder:
        placed = switched(config, "model.path", folder)
        measured = trial(placed, folder, Row(longest.text, 0, longest.columns))
        steps = call_and_branches(placed)[0]["num_inference_steps"]
    rewards, unknown = rewards_of(config)
    measured = replace(measured, components=measured.components | {"rewards": rewards})
    states = -(-kept_states(config, steps) // config.run.processes)
    return fitted(FlowBudget(config, measured, states), gpu_bytes, unknown)
