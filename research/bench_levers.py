"""Measure what single things that spare a rollout work are worth: with each, and with it taken out, in turns.

    OMP_NUM_THREADS=1 python research/bench_levers.py [--rounds 3] [--json FILE]

A rollout of a chain of the embedded model, of 8 and 32 rows a call, over the CPU seconds that it spends in its transformer:

 - `device`: a pipeline keeps its device until a component is replaced or moved.
 - `embeddings`: those of a call are put together once, as long as they are asked for again.
 - `latents`: a state is an argument of the call, which then draws none.

And `adapters`: to compute as the base below adapters and to go back, in the random transformer of size `wide`, whose layers
that have adapters are looked for once. Samples are the same to the bit with each and without it, or the script ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import bench_flow
import flow_sizes
import paired
import torch
from flow_sizes import begun, settings, trainer_of
from paired import Ratio, in_turns, spread

from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from samplers.trees import Tree

ENTRIES = 20  # of a reference, in one turn


def no_device(policy: DiffusersPolicy) -> tuple[object, str, object]:
    """A pipeline of its own class, which looks for its device in every call."""
    return policy.pipe, "__class__", type(policy.pipe).__mro__[1]


def no_embeddings(policy: DiffusersPolicy) -> tuple[object, str, object]:
    """Calls that put their embeddings together anew."""
    return policy.walk.embeddings._batches, "of", lambda key, make: make()


def no_latents(policy: DiffusersPolicy) -> tuple[object, str, object]:
    """Calls that draw latents, in the place of which the state comes."""
    latents = policy.walk.latents
    return latents, "slots", [replace(slot, argument=None) for slot in latents.slots]


# What each lever is taken out by: an object, its attribute, and what that is instead.
LEVERS = {"device": no_device, "embeddings": no_embeddings, "latents": no_latents}


@contextmanager
def without(name: str, policy: DiffusersPolicy) -> Iterator[None]:
    """Context in which a policy lacks a lever."""
    owner, attribute, instead = LEVERS[name](policy)
    real = getattr(owner, attribute)
    setattr(owner, attribute, instead)
    try:
        yield
    finally:
        setattr(owner, attribute, real)


def rollouts(rounds: int) -> dict[str, Ratio]:
    """Rollouts over the time that they spend in the transformer, as they are and without each lever."""
    size, found = flow_sizes.SIZES["shapes"], {}
    policy, weights = begun(size)
    (network,) = policy.modules.values()
    for rows in size.rows:
        grow = partial(bench_flow.grown, trainer_of(policy, weights, settings(size, "chain", rows)))

        def grown_without(name: str, grow: Callable[[], Tree] = grow) -> Tree:
            with without(name, policy):
                return grow()

        works = {"as it is": grow, **{f"without {name}": partial(grown_without, name) for name in LEVERS}}
        expected = grow().samples
        for name, work in works.items():
            if not all(map(torch.equal, work().samples, expected)):
                raise SystemExit(f"{name}: samples differ")
        with bench_flow.over_inside(network) as ratio:
            taken = in_turns(works, rounds, ratio)
        found |= {
            f"shapes, {rows} rows: rollout / transformer in it, {name}": spread(own) for name, own in taken.items()
        }
    return found


def references(rounds: int) -> dict[str, Ratio]:
    """To compute as the reference and to go back where adapters are known, over where they are looked for."""
    _, weights = begun(flow_sizes.SIZES["wide"])

    def entered(*, anew: bool) -> None:
        for _ in range(ENTRIES):
            if anew:
                vars(weights).pop("_adapted", None)
            with weights.policy("reference"):
                pass

    works = {anew: partial(entered, anew=anew) for anew in (False, True)}
    taken = in_turns(works, rounds, paired.cpu)
    return {"wide: adapters of the reference known / looked for": paired.paired(taken[False], taken[True])}


def main() -> None:
    """The command line."""
    options = paired.parser(__doc__, rounds=3).parse_args()
    torch.set_num_threads(1)
    paired.tell({**rollouts(options.rounds), **references(options.rounds)}, options)


if __name__ == "__main__":
    main()
