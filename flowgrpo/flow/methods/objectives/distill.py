"""On-policy distillation: pull the policy towards a teacher on the states that the policy visits, whatever the rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import model_validator
from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.flow.methods.objectives.matching import Unbounded
from flowgrpo.flow.methods.objectives.policy_gradient import LossInputs, TrainedStep
from flowgrpo.schema.imports.heavy import Tensor, torch


class Distill(Unbounded):
    """The divergence from a teacher alone (verl-omni's `distill_kl`), without advantages.

    The student's own states are the inputs, without gradient, so it learns where it goes itself. In steps of one kernel,
    with mean = P x + Q v and noise S, the exact KL is Q^2 / (2 S^2) mean (v - v_teacher)^2.
    """

    rewarded: ClassVar[bool] = False

    name: Literal["distill"] = "distill"

    @model_validator(mode="after")
    def _learns(self) -> Distill:
        if self.kl.beta == 0:
            raise InputError("algorithm.objective.kl.beta: distill has no other loss than the divergence, raise it")
        if self.kl.reference != "teacher":
            raise InputError(
                f"algorithm.objective.kl.reference: distill learns from a teacher, {self.kl.reference} is the student; take "
                "teacher"
            )
        return self

    @override
    def pulls(self, steps: Sequence[TrainedStep], sigma_cap: float) -> list[float]:
        return [0.0] * len(steps)

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        return torch.zeros_like(inputs.log_prob)
