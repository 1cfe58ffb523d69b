"""Early stop of chains without bias: options, chances and draws (`flowgrpo.flow.rollouts.early_stop` uses them)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from flowgrpo.errors import InputError
from flowgrpo.schema.base import Strict
from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.schema.imports.lazy import lazy

if TYPE_CHECKING:
    from samplers import noise
else:
    noise = lazy("samplers.noise")

HALVINGS = 64  # of the interval of the factor in `survival_chances`


class Stop(Strict):
    """Stop chains whose foretold reward is near the mean of their group, without bias (ARRoL, arXiv 2603.24840).

    The paper trains a small head to foretell rewards and keeps a balanced set of survivors. Here a chain's clean estimate
    x - sigma v is decoded and scored, and a draw with a known chance decides. The weights 1 / chance keep the expected
    update (ours). It saves evaluations and adds variance, see docs/research/oracle.md.
    """

    step: int = Field(ge=1)
    """Step before which chains stop. The clean estimates are those of the evaluation of the step before."""
    keep: float = Field(0.75, gt=0, lt=1)
    """Expected fraction of a group's chains that go on."""
    floor: float = Field(0.5, gt=0, lt=1)
    """Smallest chance to go on; no weight is above 1 / floor."""

    @model_validator(mode="after")
    def _ordered(self) -> Stop:
        if self.floor > self.keep:
            raise InputError(
                f"algorithm.tree.stop.floor: chances of at least {self.floor} keep more than {self.keep}, take "
                f"{self.keep} or less"
            )
        return self


def survival_chances(foretold: Tensor, keep: float, floor: float) -> Tensor:
    """Return the chances (N,) float64 of a group's chains to go on, of mean `keep` and at least `floor`.

    They are proportional to the distance of a foretold reward (N,) from the mean, cut to [floor, 1]: for one cost and
    exact predictions this makes the variance of the update least (Neyman, J. R. Stat. Soc. 97, 1934). A NaN counts as the
    mean. All are `keep` if all rewards are equal.
    """
    foretold = foretold.double()
    distance = (foretold - foretold.nanmean()).abs().nan_to_num()
    if float(distance.max()) <= 1e-12 * float(foretold.nan_to_num().abs().max()):
        return torch.full_like(distance, keep)
    distance = (distance / distance.max()).clamp(min=1e-6)
    low, high = 0.0, 1e6
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if float((middle * distance).clamp(floor, 1.0).mean()) < keep:
            low = middle
        else:
            high = middle
    return (high * distance).clamp(floor, 1.0)


def survivors(chances: Tensor, addresses: Sequence[tuple[Any, ...]]) -> Tensor:
    """Return a mask (N,) of the chains that go on, by an independent draw for each at its address (`samplers.noise`)."""
    return noise.uniforms(addresses, 1)[:, 0] < chances


def check(algorithm: Any) -> None:
    """Raise InputError for axes with which stopped chains would bias or change the update."""
    baseline = algorithm.baseline
    if algorithm.stop is None:
        return
    if algorithm.likelihood.name == "elbo":
        raise InputError(
            "algorithm.tree.stop: elbo trains on final samples, but stopped chains have none; take "
            "algorithm.likelihood=trajectory, or null"
        )
    if not getattr(algorithm.objective, "rewarded", True):
        raise InputError(
            f"algorithm.tree.stop: {algorithm.objective.name} trains without rewards, so no chain is worth more than "
            "another; take null"
        )
    if algorithm.credit.name != "terminal":
        raise InputError(
            f"algorithm.credit: algorithm.tree.stop weighs whole chains, but {algorithm.credit.name} gives credit "
            "to steps; take terminal"
        )
    if baseline.name != "leave_one_out" or baseline.std != "none":
        choice = baseline.name if baseline.name != "leave_one_out" else f"leave_one_out with std: {baseline.std}"
        raise InputError(
            f"algorithm.baseline: with algorithm.tree.stop {choice} would bias the update; take '{{name: leave_one_out, "
            "std: none}'"
        )
    if baseline.combine not in ("sum", "per_reward"):
        raise InputError(
            f"algorithm.baseline.combine: weights of surviving chains do not go with {baseline.combine}, which is not "
            "linear; take sum, or algorithm.tree.stop=null"
        )
    if baseline.drops:
        raise InputError(
            f"algorithm.baseline.{baseline.drops}: it leaves out chains by their rewards, which biases the weights of "
            "algorithm.tree.stop; take false"
        )


def check_run(config: Any) -> None:
    """Raise InputError for settings of training or of the run that do not go with stopped chains."""
    train, run = config.train, config.run
    if config.algorithm.stop is None:
        return
    if train.select is not None:
        raise InputError(
            "train.select: it chooses chains by their rewards, which biases the weights of algorithm.tree.stop; take null"
        )
    if train.split == "edges":
        raise InputError("train.split: algorithm.tree.stop weighs whole chains; take groups or samples")
    if run.engine is not None:
        raise InputError("run.engine: an engine samples whole chains; take algorithm.tree.stop=null")
