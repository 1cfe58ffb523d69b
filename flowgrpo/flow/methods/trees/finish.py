"""How the ODE steps are walked that lead to a reward and to nothing else: from a brush's children, and of twigs.

Neither a gradient nor a ratio passes there, so that they may be cheap: what they get wrong is noise, or bias, of a reward.
How much of the order of siblings is left is measured as a run goes (`finish/rank_agreement`); see
`flowgrpo.flow.rollouts.cheap_finishes`.
"""

from __future__ import annotations

from itertools import product
from typing import Any, Literal

from pydantic import Field, model_validator

from flowgrpo.errors import InputError
from flowgrpo.schema.base import Strict
from flowgrpo.training.weights.low_precision_copies import Copied

THRESHOLD = 0.1  # of a cache of blocks
CHECK = 10  # iterations between two measurements, where nothing else is said


class Finish(Strict):
    """How ODE steps are walked that only lead to a reward; a number alone is `steps`."""

    steps: int | None = Field(None, ge=1)
    """ODE steps at most, spread evenly over those that remain, coarser for fewer; null: all of them."""
    dtype: Copied | None = None
    """Walk them by a copy of the linear layers in low precision: bfloat16, or a word of train.draft.precision, with which it
    is shared; null: by the network as it is."""
    cache: Literal["first_block"] | None = None
    """first_block: where a step changes what the first block adds by less than threshold, take what the other blocks added
    at the last step that computed them; null: compute every block."""
    threshold: float = Field(THRESHOLD, gt=0)
    """Largest change of the first block's part, over its size, at which the other blocks are left out."""
    check: int | None = Field(None, ge=0)
    """Finish the first group exactly, too, and compare its rewards, each so many iterations, from the first on; 0: never.
    null: 10 with a dtype or a cache, 0 without."""

    @model_validator(mode="before")
    @classmethod
    def _number(cls, written: Any) -> Any:
        return {"steps": written} if isinstance(written, int) and not isinstance(written, bool) else written

    @model_validator(mode="after")
    def _used(self) -> Finish:
        check_threshold(self, "algorithm.tree.finish")
        return self

    @property
    def cheap(self) -> bool:
        """Whether other numbers come out than the network's own."""
        return self.dtype is not None or self.cache is not None

    @property
    def every(self) -> int:
        """Iterations between two measurements; 0 for none."""
        if self.check is None:
            return CHECK if self.cheap else 0
        return self.check


def check_threshold(own: Any, key: str) -> None:
    """Refuse a threshold that was written where nothing is cached.

    Args:
        own: section that has a cache and its threshold.
        key: of the section.

    Raises:
        InputError: names the key.
    """
    if own.cache is None and "threshold" in own.model_fields_set and own.threshold != THRESHOLD:
        raise InputError(f"{key}.threshold: nothing is cached, take {key}.cache=first_block")


def check(config: Any) -> None:
    """Refuse caches where several processes call a network together, each of which would decide for itself.

    Args:
        config: of a run of a flow model.

    Raises:
        InputError: names the key.
    """
    sections = {
        "algorithm.tree.finish": getattr(config.algorithm.tree, "finish", None),
        "train.draft": config.train.draft,
    }
    together = {"run.sharding": ("none", config.run.sharding), "run.context_parallel": (1, config.run.context_parallel)}
    for (section, own), (key, (alone, asked)) in product(sections.items(), together.items()):
        if own is not None and own.cache is not None and asked != alone:
            raise InputError(
                f"{section}.cache: by {key}={asked} processes call a network together, and would leave out blocks each "
                f"for itself; take null, or {key}={alone}"
            )
