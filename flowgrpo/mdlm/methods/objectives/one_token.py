"""The objective that learns from known solutions, one token at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from flowgrpo.mdlm.methods.likelihoods.masked_views import Views
from flowgrpo.mdlm.methods.objectives.objective import Divergence, LossInputs, Objective
from flowgrpo.schema.base import Positive
from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.schema.imports.lazy import lazy

if TYPE_CHECKING:
    from flowgrpo.mdlm.methods.likelihoods import one_token_reward
else:
    one_token_reward = lazy("flowgrpo.mdlm.methods.likelihoods.one_token_reward")


class OneToken(Objective):
    """One-token rollout (OTR, arXiv 2509.26313): the policy gradient of each token of a known solution, drawn anew.

    At each position the paper draws many tokens, rewards the solution's with 1 and others with `wrong`, and takes the
    policy gradient. This is its exact mean, in one evaluation and without variance (reconstructed: its code was not at
    hand). At temperature 1 and `wrong` 0 it is supervised fine-tuning with tokens weighted by their probability (arXiv
    2508.05629); as the temperature rises, plain supervised fine-tuning. A token of probability 0 teaches nothing.

    Solutions stand in place of rollouts, which are not sampled. The rewards of the run score the solutions and have no
    effect.
    """

    rewarded: ClassVar[bool] = False

    name: Literal["one_token"] = "one_token"
    column: str = "completion"
    """Column of the prompts that has the solution."""
    wrong: float = Field(-0.1, lt=1)
    """Reward of a token that is not the solution's, whose reward is 1."""
    temperature: Positive = 1.3
    """Temperature of the draws."""

    @property
    def kl(self) -> Divergence:
        """A KL term of weight 0."""
        return Divergence()

    @property
    @override
    def solutions(self) -> str | None:
        return self.column

    @property
    @override
    def token_score(self) -> Callable[[Tensor, Tensor], Tensor]:
        return partial(one_token_reward.one_token_reward, wrong=self.wrong, temperature=self.temperature)

    @override
    def separable(self, views: Views) -> bool:
        return True

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        return -(inputs.token_weight * inputs.active_weight * inputs.new).sum()

    @override
    def log_ratio(self, inputs: LossInputs) -> Tensor:
        """Return zeros (B, L): solutions have no old policy."""
        return torch.zeros_like(inputs.token_weight)

    @override
    def stopped(self, inputs: LossInputs) -> Tensor:
        return torch.zeros_like(inputs.token_weight, dtype=torch.bool)
