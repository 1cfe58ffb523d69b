"""What no engine can do for a run, of whatever kind its model is."""

from __future__ import annotations

from flowgrpo.errors import InputError
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.engine.failures import KEY

INSTEAD = f"or set {KEY}=null"


def check(config: RunConfig) -> None:
    """Refuse a run whose weights are not one set of adapters that every process has whole.

    Raises:
        InputError: it is one; the sentence says what to set instead.
    """
    run = config.run
    for key, value in (("run.generators", run.generators), ("run.staleness", run.staleness)):
        if value:
            raise InputError(f"{key}: an engine rolls out by the weights as they stand; set it to 0, {INSTEAD}")
    if run.sharding != "none":
        raise InputError(f"run.sharding: adapters are pushed from whole networks; set it to none, {INSTEAD}")
    if config.model.lora is None:
        raise InputError(f"model.lora: an engine is pushed adapters, not whole networks; give it a rank, {INSTEAD}")
