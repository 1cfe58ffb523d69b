"""Measure single optimisations of a rollout ("levers"): with each, and without it, in turns.

    OMP_NUM_THREADS=1 python research/bench_levers.py [--rounds 3] [--json FILE]

Each ratio is a chain rollout of the embedded model, with 8 or 32 rows per call, over the CPU seconds that it spends in
its transformer. The levers are:

 - `device`: a pipeline caches its device until a component is replaced or moved.
 - `embeddings`: the embeddings of a call are batched once and reused while the same rows are called.
 - `latents`: the state is an argument of the call, so that the call draws no latents.

A further ratio is `adapters`: switching to the reference below the adapters and back, in the random transformer of size
`wide`. The lever there is to look for layers with adapters only once. Samples with and without a lever must be equal to
the bit, or the script ends.
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

ENTRIES = 20  # switches to the reference in one turn


def no_device(policy: DiffusersPolicy) -> tuple[object, str, object]:
    """Return the change that gives a pipeline its own class, which looks for the device in every call."""
    return policy.pipe, "__class__", type(policy.pipe).__mro__[1]


def no_embeddings(policy: DiffusersPolicy) -> tuple[object, str, object]:
    """Return the change that batches embeddings anew in every call."""
    return policy.walk.embeddings._batches, "of", lambda key, make: make()


def no_latents(policy: DiffusersPolicy) -> tuple[object, str, object]:
    """Return the change that lets calls draw latents, which the state then replaces."""
    latents = policy.walk.latents
    return latents, "slots", [replace(slot, argument=None) for slot in latents.slots]


# The change that removes each lever: an object, its attribute, and the new value.
LEVERS = {"device": no_device, "embeddings": no_embeddings, "latents": no_latents}


@contextmanager
def without(name: str, policy: DiffusersPolicy) -> Iterator[None]:
    """Remove a lever from a policy as long as the context is open."""
    owner, attribute, instead = LEVERS[name](policy)
    real = getattr(owner, attribute)
    setattr(owner, attribute, instead)
    try:
        yield
    finally:
        setattr(owner, attribute, real)


def rollouts(rounds: int) -> dict[str, Ratio]:
    """Return the ratios of rollouts to their time in the transformer, with all levers and without each."""
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
            f"shapes, {rows} rows: rollout / transformer in it, {name}": spread(each) for name, each in taken.items()
        }
    return found


def references(rounds: int) -> dict[str, Ratio]:
    """Return the ratio of switching to the reference with known adapters to switching with a search for them."""
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
    """Run the command line."""
    options = paired.parser(__doc__, rounds=3).parse_args()
    torch.set_num_threads(1)
    paired.tell({**rollouts(options.rounds), **references(options.rounds)}, options)


if __name__ == "__main__":
    main()
