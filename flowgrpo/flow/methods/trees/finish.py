"""How to finish a branch or a twig: ODE steps that lead only to a reward.

No gradient and no ratio passes there, so these steps may be cheap: an error is noise or bias of a reward. A run measures
how much of the siblings' order is left (`finish/rank_agreement`); see `flowgrpo.flow.rollouts.cheap_finishes`.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from flowgrpo.schema.base import Strict
from flowgrpo.training.weights.low_precision_copies import Copied

CHECK = 10  # default iterations between two measurements


class Finish(Strict):
    """How to take the ODE steps that lead only to a reward; a number alone is `steps`."""

    steps: int | None = Field(None, ge=1)
    """ODE steps at most, spread evenly over those that remain, coarser for fewer; null: all of them."""
    dtype: Copied | None = None
    """Walk them by a copy of the linear layers in low precision: bfloat16, or a word of train.draft.precision, with which it
    is shared; null: by the network as it is."""
    check: int | None = Field(None, ge=0)
    """Finish the first group exactly, too, and compare its rewards, each so many iterations, from the first on; 0: never.
    null: 10 with a dtype, 0 without."""

    @model_validator(mode="before")
    @classmethod
    def _number(cls, written: Any) -> Any:
        return {"steps": written} if isinstance(written, int) and not isinstance(written, bool) else written

    @property
    def cheap(self) -> bool:
        """Return whether the numbers differ from the network's own."""
        return self.dtype is not None

    @property
    def every(self) -> int:
        """Return the iterations between two measurements; 0 for none."""
        if self.check is None:
            return CHECK if self.cheap else 0
        return self.check
